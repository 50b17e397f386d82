"""Refusal of models that llama.cpp would compute otherwise than transformers does."""

import re
from itertools import chain

from moetool.checkpoint.experts import ExpertReader
from moetool.errors import InvalidInputError
from moetool.export.gguf.facts import WHOLE
from moetool.export.gguf.model import GgufSource
from moetool.export.gguf.rope import LONG_ROPE, ROPE_SCALINGS, stretch
from moetool.format.gguf.words import SHARED_EXPERT, layer_of
from moetool.format.gguf.yarn import yarn_strengths
from moetool.runtime.building import check_sizes

_OF_STATE, _OF_KEYS = re.compile(r"\.(ssm_|shortconv\.)"), re.compile(r"\.attn_(k|kv_a_mqa)\.")
# llama.cpp expects models with so many layers, or with so many layers and tokens, to have no q_lora_rank.
_LITE_LAYERS, _LITE_VOCABULARY = (26, 27), (48, 128256)


def check_source(source: GgufSource) -> None:
    """Raise `InvalidInputError` for what llama.cpp would compute otherwise, or transformers not at all."""
    config, family = source.config, source.family
    for key, (own, words) in family.choices.items():
        if (said := getattr(config, key, None)) not in words:
            raise InvalidInputError(f"config.json has {key} = {said!r}; llama.cpp's {own} knows no such thing.")
    for key, known in {"hidden_act": ("silu", "swish"), **family.computes}.items():
        if (value := getattr(config, key, known[0])) not in known:
            raise InvalidInputError(
                f"config.json has {key} = {value!r}; llama.cpp's '{family.architecture}' computes with {known[0]!r}, "
                "whatever a file says. It would be another model."
            )
    if (reason := family.objection(config)) is not None:
        raise InvalidInputError(
            f"llama.cpp's '{family.architecture}' computes another model than this config.json says: {reason}."
        )
    if source.experts is not None:
        _check_layers(source, source.experts)
        _check_shared(source)
    _check_attention(source)
    _check_states(source)
    _check_rope(source)
    if not source.checkpoint.is_imagined:
        check_sizes(source.checkpoint)
        _check_idle(source)


def _check_idle(source: GgufSource) -> None:
    """Raise `InvalidInputError` unless the outputs of all shared experts that the file leaves out are zero."""
    for name in source.idle_names:
        if name.endswith("down_proj.weight") and bool(source.checkpoint.read(name).any()):
            raise _two_rules(
                f"{name} is not zero", " Of an upcycled model `moetool tune --train experts` leaves it zero."
            )


def _check_layers(source: GgufSource, experts: ExpertReader) -> None:
    family, layers, groups = source.family, source.layers, experts.architecture.groups
    own = family.architecture
    if family.leaves_out and any(experts.layout(layer).is_extended for layer in experts.moe_layers):
        raise _two_rules("they are stored on the base of the others")
    first = source.dense_layers if family.leads_dense else 0
    if not family.mixes_layers and experts.moe_layers != tuple(range(first, layers)):
        where = "in every layer behind the first without" if family.leads_dense else "in every layer"
        raise InvalidInputError(
            f"{layers - len(experts.moe_layers)} of {layers} layers have no experts; llama.cpp's '{own}' has them "
            f"{where}."
        )
    if groups[0] != groups[1] and not family.groups_experts:
        raise InvalidInputError(
            f"A token's experts are from the best {groups[1]} of {groups[0]} groups; llama.cpp's '{own}' chooses among "
            "groups in another way."
        )


def _check_shared(source: GgufSource) -> None:
    """Where a shared expert is missing llama.cpp loads no model, or takes its input for its output."""
    family = source.family
    has_place = family.has_shared or SHARED_EXPERT["down"] in family.names.values()
    if has_place and not family.may_lack_shared and not source.shared_intermediate:
        raise InvalidInputError(
            f"This model has no shared expert; llama.cpp's '{family.architecture}' adds one to the others in every "
            "layer with experts. It would be another model."
        )


def _check_attention(source: GgufSource) -> None:
    config, family = source.config, source.family
    own, layers = family.architecture, range(1, source.layers + 1)
    heads, groups = int(config.num_attention_heads), source.key_heads
    if family.is_square and heads * source.head_width != config.hidden_size:
        raise InvalidInputError(
            f"{heads} heads of {source.head_width} do not add up to the hidden size of {config.hidden_size}; "
            f"llama.cpp's '{own}' has no others."
        )
    if groups != heads and not family.groups_heads:
        raise InvalidInputError(
            f"This model has {groups} heads of keys for {heads} of queries; llama.cpp's '{own}' has as many."
        )
    period = family.window_period
    if period and source.windows != [layer % period != 0 for layer in layers]:
        raise InvalidInputError(
            f"llama.cpp's '{own}' lets every {period}th layer attend to all of a text and the others to a window; the "
            "layers of this model (layer_types) do otherwise."
        )
    if family.needs_windows and not source.windows:
        raise InvalidInputError(
            f"Every layer of this model attends to all of a text (layer_types); llama.cpp's '{own}' wants windows."
        )
    if family.attention_interval is not None:
        every = source.attention_interval
        if [kind == WHOLE for kind in config.layer_types] != [layer % every == 0 for layer in layers]:
            raise InvalidInputError(
                f"llama.cpp's '{own}' has attention in every so many layers; the layers of this model (layer_types) "
                "have it otherwise."
            )
    if family.is_latent and family.is_lite_by_layers:
        size = source.layers, int(config.vocab_size)
        if (source.layers in _LITE_LAYERS or size == _LITE_VOCABULARY) != (config.q_lora_rank is None):
            raise InvalidInputError(
                f"q_lora_rank is {config.q_lora_rank!r} in a model of {source.layers} layers; llama.cpp's '{own}' "
                "expects the opposite of models with so many."
            )


def _check_states(source: GgufSource) -> None:
    """Of families with layers that carry a state: llama.cpp keeps states and keys, and loads no model without both."""
    family = source.family
    if family.attends_beside_states:
        return
    owns = {name: names for name, (_, names) in family.changed(range(source.layers), source.layer).items()}
    owns |= {name: (own,) for name, own in source.names_in_file.items()}
    if not any(map(_OF_STATE.search, chain(*owns.values()))):
        return
    found = list(chain(*(names for name, names in owns.items() if name in source.checkpoint.tensors)))
    with_state = {layer_of(own) for own in found if _OF_STATE.search(own)}
    with_keys = {layer_of(own) for own in found if _OF_KEYS.search(own)} - with_state
    if not (with_state and with_keys):
        raise InvalidInputError(
            f"{len(with_state)} of {source.layers} layers carry a state from token to token, and {len(with_keys)} have "
            "attention; llama.cpp loads only models of this kind that have both."
        )


def _check_rope(source: GgufSource) -> None:
    family, rope = source.family, source.rope
    own, kind = family.architecture, rope.get("rope_type", "default")
    if source.rotary_share != 1 and not (family.is_partial or family.has_two_widths):
        raise InvalidInputError(
            f"Rotary embeddings turn {source.rotary_share:.0%} of each head; llama.cpp's '{own}' turns all of it."
        )
    known = {"default": True, "llama3": family.slows_rope, LONG_ROPE: family.has_long_rope}
    known["dynamic"] = family.stretches_rope == ("alpha" in rope)
    if family.has_two_widths:  # llama.cpp wants to be told of every pair of channels
        known = {"proportional": True, **dict.fromkeys(("default", *ROPE_SCALINGS), False)}
    if family.is_latent:  # whose scores llama.cpp would multiply, too
        known |= {"linear": False, "dynamic": False}
    if not known.get(kind, kind in ROPE_SCALINGS):
        raise InvalidInputError(f"llama.cpp's '{own}' has no rotary embeddings '{kind}'.")
    if kind == "yarn" and not family.weighs_scores and yarn_strengths(family, rope, stretch(source))[1]:
        raise InvalidInputError(
            "YaRN multiplies rotary embeddings and scores of this model by two numbers (mscale, mscale_all_dim); "
            f"llama.cpp's '{own}' multiplies both by the same one."
        )
    if source.windows:
        _check_rope_of_windows(source)


def _check_rope_of_windows(source: GgufSource) -> None:
    family, rope, other, own = source.family, source.rope, source.rope_of_windows, source.family.architecture
    if family.windows_turn_alike and rope.get("rope_theta") != other.get("rope_theta"):
        raise InvalidInputError(
            f"Rotary embeddings have another base in layers with a window; llama.cpp's '{own}' has one for all."
        )
    if other is not rope and (kind := other.get("rope_type", "default")) != "default":
        raise InvalidInputError(
            f"Layers with a window have rotary embeddings '{kind}' of their own; llama.cpp's '{own}' has none there."
        )
    shares = {1.0 if family.is_latent else one.get("partial_rotary_factor") or 1.0 for one in (rope, other)}
    is_turned = family.has_two_widths or all(source.windows) or family.doubles_turned
    is_turned = is_turned or (family.turns_shares and not source.windows[0])
    if len(shares) > 1 and not is_turned:
        where = " unless the first layer attends to all of a text" if family.turns_shares else ""
        raise InvalidInputError(
            "Rotary embeddings turn another share of each head in layers with a window (partial_rotary_factor); "
            f"llama.cpp's '{own}' turns the same{where}."
        )


def _two_rules(reason: str, advice: str = "") -> InvalidInputError:
    return InvalidInputError(
        "This model's routing weights add up to one (norm_topk_prob), and it has shared experts that are not idle "
        f"({reason}): llama.cpp has no architecture that computes both.{advice}"
    )
