"""Validation of `config.json` and of moetool's entry in it, done once for every checkpoint that is opened.

Of a dense family, and of an MoE family that has a name in moetool, the numbers that it computes with are checked; the
rest, and all of any other family, is left to transformers. No check refuses what transformers computes: names of
activations and of rotary embeddings that are not listed here are looked up there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from moetool.architectures.base import EXPERT_KEYS, GROUP_KEYS, TOP_K_KEYS, Settings, whole_number
from moetool.architectures.dense import find_dense_architecture
from moetool.architectures.dense.derived import derive_dense
from moetool.architectures.dense.known import CHECKED
from moetool.architectures.known import KNOWN
from moetool.errors import InvalidInputError
from moetool.format.beside import quantized_beside
from moetool.format.entry import check_format_version, layer_layouts
from moetool.format.fields import MOST_EXPERTS, Bytes, Count, LayerCount, Name, Positive, Share, explain
from moetool.format.kinds import custom_module
from moetool.format.kinds.moe import MoESpec
from moetool.format.marker import moetool_entry

DEEPEST = 64  # objects and lists in one another
# Names that entries have in families that are known.
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_SIZE_KEYS = (("vocab_size",), ("hidden_size", "n_embd", "d_model"))
# What families in this package use; any other name is looked up in transformers, which takes seconds to import.
_ACTIVATIONS = frozenset({"silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2"})
_ROPES = frozenset({"default", "linear", "dynamic", "yarn", "llama3", "longrope"})
_ROPES_OF_OLD = frozenset({"su", "mrope"})  # names that families translate


def _activation(name: str | None) -> str | None:
    if name is not None and name not in _ACTIVATIONS:
        from transformers.activations import ACT2FN

        if name not in ACT2FN:
            raise ValueError(f"transformers has no such activation; it has {', '.join(sorted(ACT2FN))}")
    return name


def _rope_type(name: str | None) -> str | None:
    if name is not None and name not in _ROPES | _ROPES_OF_OLD:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        known = {"default", *ROPE_INIT_FUNCTIONS}
        if name not in known:
            raise ValueError(f"transformers has no such rotary embedding; it has {', '.join(sorted(known))}")
    return name


def _typed(value: object) -> object:
    """Rotary embeddings may be listed by kind of layer."""
    if isinstance(value, Mapping) and value and all(isinstance(inner, Mapping | None) for inner in value.values()):
        return {"by_kind": value}
    return value


Activation = Annotated[str, Field(strict=True), AfterValidator(_activation)]
RopeType = Annotated[str, Field(strict=True), AfterValidator(_rope_type)]


class _Entries(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class _Rope(_Entries):
    rope_type: RopeType | None = None
    type: RopeType | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    by_kind: dict[str, "_Rope | None"] | None = None


class _Any(_Entries):
    """Schema of the `config.json` entries that every model of transformers shares."""

    model_type: Name | None = None
    architectures: list[str] | None = None
    quantization_config: dict[str, object] | None = None


class _Known(_Any):
    """What the families of this package have in common, each under one of several names."""

    vocab_size: Count = 1
    hidden_size: Count = 1
    n_embd: Count = 1
    num_hidden_layers: LayerCount = 1
    num_layers: LayerCount = 1
    n_layer: LayerCount = 1
    num_attention_heads: Count = 1
    n_head: Count = 1
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count | None = None
    moe_intermediate_size: Count | None = None
    n_inner: Count | None = None
    ffn_hidden_size: Count | None = None
    max_position_embeddings: Count | None = None
    n_positions: Count | None = None
    hidden_act: Activation | None = None
    hidden_activation: Activation | None = None
    activation_function: Activation | None = None
    rope_theta: Positive | None = None
    rope_parameters: Annotated[_Rope, BeforeValidator(_typed)] | None = None
    rope_scaling: Annotated[_Rope, BeforeValidator(_typed)] | None = None
    tie_word_embeddings: Annotated[bool, Field(strict=True)] | None = None
    rms_norm_eps: Share | None = None
    layer_norm_eps: Share | None = None
    layer_norm_epsilon: Share | None = None
    n_group: Count | None = None
    topk_group: Count | None = None
    decoder_sparse_step: Count | None = None
    attention_dropout: Share | None = None
    attention_probs_dropout_prob: Share | None = None
    attn_pdrop: Share | None = None
    resid_pdrop: Share | None = None
    embd_pdrop: Share | None = None
    hidden_dropout: Share | None = None
    hidden_dropout_prob: Share | None = None

    @model_validator(mode="after")
    def _heads(self) -> Self:
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if shared is not None and "num_attention_heads" in self.model_fields_set and heads % shared:
            raise ValueError(f"num_key_value_heads is {shared}, which does not divide num_attention_heads, {heads}")
        return self


class _Entry(_Entries):
    """moetool's `quantization_config`."""

    format_version: Count = 1
    layers: dict[str, dict[str, object]] = {}
    original_bytes: Bytes | None = None
    stored: dict[str, object] | None = None


def check_depth(parsed: object, file: Path) -> None:
    """Raise `InvalidInputError` for JSON that nests deeper than anything that is meant: libraries recurse into it."""
    level = [value for value in (parsed,) if isinstance(value, dict | list)]
    depth = 0
    while level:
        if depth > DEEPEST:
            raise InvalidInputError(f"{file} has more than {DEEPEST} objects and lists in one another.")
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        depth += 1


def check_config(config: Mapping[str, object], file: Path) -> None:
    """Check a parsed `config.json`, whatever it leaves out.

    Raises:
        InvalidInputError: a field is not what it has to be; the message has its name, its value and what was expected.
    """
    _validate(_Known if _is_checked(config.get("model_type")) else _Any, config, str(file))
    if (entry := moetool_entry(config)) is not None:
        check_format_version(entry)
        _validate(_Entry, entry, f"{file}, quantization_config")
        _check_custom(config, file)


def is_known(config: Mapping[str, object]) -> bool:
    """Whether moetool knows the family of a `config.json`, and so what its settings have to be."""
    return isinstance(custom_module(config), MoESpec) or _is_checked(config.get("model_type"))


def check_settings(settings: Settings, config: Mapping[str, object], file: Path) -> None:
    """Check the numbers of a model of a known family against each other, those among them that transformers fills in.

    Args:
        settings: the model's.
        config: its `config.json`, which may say less.
        file: where that lies.

    Raises:
        InvalidInputError: a number is too large, or two of them do not fit.
    """
    heads = whole_number(settings, "num_attention_heads")
    shared = whole_number(settings, "num_key_value_heads")
    if heads and shared and heads % shared:
        said = _said("num_key_value_heads", config, shared)
        raise InvalidInputError(f"{file}: {said}, which does not divide num_attention_heads, {heads}.")
    if config.get("model_type") in KNOWN and not settings.keys().isdisjoint(EXPERT_KEYS):  # DBRX's lie in a part
        _check_experts(settings, config, file)
    layer_layouts(settings)
    quantized_beside(settings)


def check_headers(
    settings: Settings, config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    """Check the sizes of a model of a known family against those in the files, before anything is made in these sizes.

    Args:
        settings: the model's.
        config: its `config.json`, which may say less.
        shapes: of the tensors in the files, by name.
        path: where they lie.

    Raises:
        InvalidInputError: no tensor has that size, or the last layer no tensor.
    """
    sizes = {size for shape in shapes.values() for size in shape}
    spec = custom_module(config)
    key = _named(_LAYER_KEYS, config, settings)
    layers = spec.of if isinstance(spec, MoESpec) else whole_number(settings, key) or 0
    if (known := KNOWN.get(str(config.get("model_type")))) is None:
        last = derive_dense(config).layer_prefix(layers - 1)
    else:  # layers are called so in whatever model they lie
        inside = f"{known.layers}."
        before = next((name.partition(inside)[0] for name in shapes if inside in name), "model.")
        last = f"{before}{inside}{layers - 1}."
    end = ".".join(last.split(".")[-3:])  # the bare decoder's tensors have shorter names
    if not any(end in name for name in shapes):
        raise InvalidInputError(
            f"Every tensor of {last.rstrip('.')} is missing from {path}: config.json promises {layers} layers "
            f"({_said(key, config, layers)})."
        )
    for keys in _SIZE_KEYS:
        key = _named(keys, config, settings)
        if (size := settings[key]) not in sizes:
            raise InvalidInputError(
                f"config.json of {path}: {_said(key, config, size)}, and no tensor of the files has that size."
            )
    experts = spec.shape.experts if isinstance(spec, MoESpec) else whole_number(settings, *EXPERT_KEYS)
    if experts is not None and experts > max([len(shapes), *sizes]):
        raise InvalidInputError(f"config.json of {path} promises {experts} experts, more than the files can hold.")


def _named(keys: Sequence[str], config: Mapping[str, object], settings: Settings) -> str:
    """The first of these keys that `config.json` has, or else the settings."""
    return next((key for entries in (config, settings) for key in keys if key in entries), keys[0])


def _said(key: str, config: Mapping[str, object], value: object) -> str:
    """What a message says of a setting: whether it is the config's own or filled in."""
    return f"{key} is {value}" if key in config else f"{key} is not there, for which transformers takes {value}"


def _check_experts(settings: Settings, config: Mapping[str, object], file: Path) -> None:
    (_, experts), (key, top_k) = (_count(settings, config, keys, file) for keys in (EXPERT_KEYS, TOP_K_KEYS))
    if top_k > experts:
        raise InvalidInputError(f"{file} routes every token to {top_k} experts ({key}) but has only {experts}.")
    for keys in GROUP_KEYS:
        groups, chosen = (whole_number(settings, key) for key in keys)
        if groups and (experts % groups or (chosen or 1) > groups):
            said = " and ".join(_said(name, config, settings[name]) for name in keys)
            raise InvalidInputError(f"{file}: {said}; {experts} experts cannot be divided and chosen so.")


def _count(settings: Settings, config: Mapping[str, object], keys: tuple[str, ...], file: Path) -> tuple[str, int]:
    """The first of these keys that `config.json` has, or else the settings, and its number of experts, which may be
    listed for every layer."""
    key = _named(keys, config, settings)
    number = whole_number(settings, key)
    if number is None or isinstance(number, bool) or not 1 <= number <= MOST_EXPERTS:
        raise InvalidInputError(
            f"{file} needs a whole number from 1 to {MOST_EXPERTS} as '{key}', found {settings.get(key)!r}."
        )
    return key, number


def _is_checked(model_type: object) -> bool:
    return model_type in CHECKED or model_type in KNOWN


def _check_custom(config: Mapping[str, object], file: Path) -> None:
    """What custom modules are against what the rest of the config says."""
    layers, hidden = whole_number(config, "num_hidden_layers", "n_layer"), whole_number(config, "hidden_size", "n_embd")
    try:
        spec = custom_module(config)
    except InvalidInputError as error:
        raise InvalidInputError(f"{file}, {error}") from error
    if spec is None:
        return
    dense = find_dense_architecture(config)
    try:
        spec.check(dense, layers, hidden)
    except InvalidInputError as error:
        raise InvalidInputError(f"{file}, {error}") from error


def _validate(model: type[BaseModel], values: Mapping[str, object], where: str) -> None:
    try:
        model.model_validate(dict(values))
    except ValidationError as error:
        raise InvalidInputError(f"{where}: {explain(error)}.") from error
