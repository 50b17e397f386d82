"""`config.json` of the model in a GGUF file, from the file's metadata.

What a family's description says of metadata is undone here: whole numbers, fractions and words go back to their
entries, rotary embeddings and windows to what transformers calls them.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from moetool.checkpoint.gguf_gemma4 import entries_of_gemma4, heads_of_gemma4
from moetool.checkpoint.gguf_layers import kinds_of_layers, turns_of_layers
from moetool.checkpoint.gguf_metadata import GgufMetadata, decimal
from moetool.checkpoint.gguf_rope import rotary_embeddings
from moetool.format.gguf.words import (
    COUNTS,
    DENSE_LAYERS,
    EMBEDDINGS,
    EXPERT_COUNT,
    EXPERT_WIDTH,
    EXPERTS_USED,
    FRACTIONS,
    GROUPS,
    HEAD,
    HEAD_WIDTHS,
    OWN_INDEXERS,
    PREDICTORS,
    ROPE_BASE,
    SCALING,
    SHARED_COUNT,
    SHARED_WIDTH,
    WIDTH,
    WINDOW,
    WINDOW_PATTERN,
    layer_in_file,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LOGGER = logging.getLogger(__name__)

_WINDOWED, _WHOLE, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_LEADING = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
# Said of a model elsewhere, too, or of nothing that transformers computes.
_UNNEEDED = {
    "vocab_size",
    "tensor_data_layout",
    "use_parallel_residual",
    SHARED_WIDTH,
    *HEAD_WIDTHS[1:],
    f"{SCALING}finetuned",
    f"{SCALING}yarn_ext_factor",
}
_TOKENS = ("bos", "eos", "pad")


@dataclass(frozen=True)
class GgufConfig(GgufMetadata):
    """The config of the model in a GGUF file.

    Attributes:
        dtype: of the checkpoint's weights.
        tokens: ids of special tokens that the file names, by what they are ("bos").
    """

    dtype: torch.dtype
    tokens: Mapping[str, int]

    @cached_property
    def layers(self) -> int:
        """Number of decoder layers, without those that predict further tokens."""
        return int(self.number(COUNTS["num_hidden_layers"])) - int(self.entry(PREDICTORS) or 0)

    def build(self) -> dict[str, object]:
        """The entries of `config.json`.

        Raises:
            InvalidInputError: metadata are missing, or say what moetool does not read.
        """
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )

        family, known = self.family, self._defaults
        said: dict[str, object] = {
            "hidden_act": "silu",
            "tie_word_embeddings": HEAD not in self.shapes,
            "vocab_size": self.shapes[EMBEDDINGS][0],
        }
        said |= {**self._numbers(), "num_hidden_layers": self.layers, "num_nextn_predict_layers": 0}
        said |= self._widths()
        said |= self._attention()
        # None that is a tuple: it has infinity in it, which JSON has no number for and transformers assumes.
        said |= {key: values[0] for key, values in family.computes.items() if not isinstance(values[0], tuple)}
        said |= {key: make(self.entries) for key, make in family.told.items()}
        said |= {f"{kind}_token_id": self.tokens.get(kind) for kind in _TOKENS}
        self._check_fixed()
        classes = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
        found: dict[str, object] = {
            "architectures": [classes[family.model_type]],
            "model_type": family.model_type,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        computed = {key for key, value in vars(type(known)).items() if isinstance(value, property) and not value.fset}
        entries = {key: value for key, value in said.items() if hasattr(known, key) and key not in computed}
        found |= {known.attribute_map.get(key, key): value for key, value in entries.items()}
        found |= {key: value(found) for key, value in family.implied.items()}
        if family.has_two_widths:
            found |= entries_of_gemma4(self)
            found |= heads_of_gemma4(self, self._pattern(), self._key_heads)
        if others := sorted(self.entries.keys() - self.asked - _UNNEEDED):
            _LOGGER.warning("%s says more of its model than moetool reads: %s.", self.file, ", ".join(others))
        return found

    @cached_property
    def _defaults(self) -> "PreTrainedConfig":
        """transformers' config of the family with its defaults, which tells what entries it has."""
        return self._config_with()

    def _config_with(self, **entries: object) -> "PreTrainedConfig":
        """transformers' config of the family with these entries, its defaults for all others, and no special tokens,
        which it would compare with its default vocabulary."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        tokens = {f"{kind}_token_id": None for kind in _TOKENS}
        made: PreTrainedConfig = CONFIG_MAPPING[self.family.model_type](**tokens, **entries)
        made.per_layer_config = None  # which would make of some entries more than one
        return made

    def _numbers(self) -> dict[str, object]:
        """Entries that metadata have as they are, or in other words."""
        family, found = self.family, dict[str, Any]()
        for key, own in {**COUNTS, **family.counts}.items():
            if key == "vocab_size" or own in family.derived:
                continue
            if key == "num_key_value_heads" and self.entry(own) is None:  # as many as heads of queries
                own = COUNTS["num_attention_heads"]
            if family.varies_heads and own == COUNTS["num_key_value_heads"]:
                found[key] = max(self._key_heads)
            elif key in COUNTS or self.entry(own) is not None:
                found[key] = int(self.number(own))
            else:
                found[key] = self._shared_count() if own == SHARED_COUNT else None
        found["num_kv_heads"] = found["num_key_value_heads"]  # its name in Falcon
        has_own_epsilon = any("epsilon" in own for own in (*family.multipliers.values(), *family.fixed))
        for key, own in {**FRACTIONS, **family.multipliers}.items():
            if (value := self.entry(own)) is not None:
                found[key] = decimal(value)
            elif key in FRACTIONS and not has_own_epsilon:
                self.number(own)
        for key, own in family.of_layers.items():
            if (values := self.entry(own)) is not None:
                found[key] = list(map(decimal, values))
        found |= {key: bool(self.entry(own)) for key, own in family.flags.items()}
        for key, (own, numbers) in family.choices.items():
            said = self.number(own)
            if (word := next((word for word, number in numbers.items() if number == said), None)) is None:
                raise self.unread(f"{own} = {said}")
            found[key] = word
        for own, (one, other) in family.products.items():
            product = int(self.number(own))
            given, sought = (one, other) if one in found else (other, one)
            found[sought] = product // found.get(given, 1)
        return found

    def _shared_count(self) -> int | None:
        """Number of experts that the shared one is as wide as; `None` where there is none."""
        shared, each = self.entry(SHARED_WIDTH), self.entry(EXPERT_WIDTH)
        return int(shared) // int(each) if shared and each else None

    @cached_property
    def _head_width(self) -> int:
        own, heads = self.entry(HEAD_WIDTHS[0]), self.number(COUNTS["num_attention_heads"])
        return int(own or self.number(COUNTS["hidden_size"]) // heads)

    @cached_property
    def _key_heads(self) -> list[int]:
        """Heads of keys of each layer: none, or as many as others have."""
        key = COUNTS["num_key_value_heads"]
        said = self.entry(key)
        found = said[: self.layers] if isinstance(said, list) else [self.number(key)] * self.layers
        if len(found) != self.layers or (len({*found} - {0}) != 1 and not self.family.has_two_widths):
            raise self.unread(f"layers that differ in {key}")
        return found

    def _latent(self) -> dict[str, object]:
        """Channels of the heads of latent attention. In most files the widths of heads are those of the one head that
        llama.cpp computes it with, in early ones its own."""
        turned = int(self.number(HEAD_WIDTHS[2]))
        keys, values = (int(self.entry(f"{own}_mla") or self.number(own)) for own in HEAD_WIDTHS[:2])
        heads = int(self.number(COUNTS["num_attention_heads"]))
        return {
            "num_key_value_heads": heads,
            "qk_nope_head_dim": keys - turned,
            "v_head_dim": values,
        }

    def _widths(self) -> dict[str, object]:
        family = self.family
        width = self._dense_width()
        if not family.is_moe:
            self.asked.update((EXPERT_COUNT, EXPERTS_USED, *GROUPS))  # none, said by some converters
            return {family.dense_width: width}
        found: dict[str, object] = {
            family.dense_width: width,
            family.experts_key: int(self.number(EXPERT_COUNT)),
            **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), int(self.number(EXPERTS_USED))),
        }
        if family.width_key != WIDTH:
            own = "moe_intermediate_size" if hasattr(self._defaults, "moe_intermediate_size") else "intermediate_size"
            found[own] = int(self.number(family.width_key))
        if family.shared_width is not None:
            is_missing = family.may_lack_shared and self.entry(SHARED_WIDTH) is None
            found[family.shared_width] = 0 if is_missing else int(self.number(SHARED_WIDTH))
        if family.leads_dense:
            found |= self._dense_layers()
        if hasattr(self._defaults, "n_group"):
            groups = (int(self.entry(own) or 1) for own in GROUPS)
            found |= dict(zip(("n_group", "topk_group"), groups, strict=True))
        return found

    def _dense_width(self) -> int:
        """Width of networks without experts; some layers may have none, or (in Gemma 4) one that is twice as wide."""
        said = self.entry(WIDTH)
        if not isinstance(said, list) or not (self.family.skips_experts or self.family.has_two_widths):
            return int(self.number(WIDTH))
        widths = {*said[: self.layers]} - ({0} if self.family.skips_experts else set())
        if len(widths) > 1 and [*sorted(widths)] != [least := min(widths), 2 * least]:
            raise self.unread(f"layers that differ in {WIDTH}")
        return int(min(widths, default=0))

    def _dense_layers(self) -> dict[str, object]:
        """Entries that say how many layers lead without experts, by all names that families have for it."""
        self.asked.add(DENSE_LAYERS)  # of which not every converter writes it
        routers = (layer_in_file(layer, "ffn_gate_inp.weight") in self.shapes for layer in range(self.layers))
        count = next((layer for layer, has_router in enumerate(routers) if has_router), self.layers)
        kinds = ["dense" if layer < count else "sparse" for layer in range(self.layers)]
        return {**dict.fromkeys(_LEADING, count), "mlp_layer_types": kinds}

    def _attention(self) -> dict[str, object]:
        """Entries of biases, windows and rotary embeddings."""
        family, rope = self.family, rotary_embeddings(self, self._head_width)
        found: dict[str, object] = self._latent() if family.is_latent else {"head_dim": self._head_width}
        if family.biases:
            if "o_proj" in family.biases and self._has("attn_q.bias") != self._has("attn_output.bias"):
                raise self.unread("biases of some matrices of attention only")
            found |= dict.fromkeys(("attention_bias", "use_qkv_bias"), self._has("attn_q.bias"))
        found["mlp_bias"] = self._has("ffn_down.bias")
        if family.has_head_norms:
            found["use_qk_norm"] = layer_in_file(0, "attn_q_norm.weight") in self.shapes
        found["num_ln_in_parallel_attn"] = 1 + (layer_in_file(0, "attn_norm_2.weight") in self.shapes)
        found["use_parallel_residual"] = layer_in_file(0, "ffn_norm.weight") not in self.shapes
        if hasattr(self._defaults, "indexer_types"):
            names = (layer_in_file(layer, "indexer.attn_k.weight") for layer in range(self.layers))
            own = self.entry(OWN_INDEXERS) or [name in self.shapes for name in names]
            found["indexer_types"] = ["full" if one else "shared" for one in own[: self.layers]]
        if family.kinds_by_heads is not None:
            found["layer_types"] = [family.kinds_by_heads[heads > 0] for heads in self._key_heads]
        if family.skips_experts:
            found["layer_types"] = kinds_of_layers(self, self.layers)
        if hasattr(self._defaults, "attn_layer_period"):
            found |= turns_of_layers(self, self.layers)
        if family.attention_interval is not None:
            step = int(self.number(family.attention_interval))
            found["layer_types"] = [_LINEAR if (layer + 1) % step else _WHOLE for layer in range(self.layers)]
        window, base = self.entry(WINDOW), self.entry(f"{ROPE_BASE}_swa")
        has_kinds = _WHOLE in (getattr(self._defaults, "rope_parameters", None) or {})  # of rotary embeddings
        if window and family.window_period is not None:
            found["sliding_window"] = int(window)
            pattern = [(layer + 1) % (family.window_period or 1) != 0 for layer in range(self.layers)]
            if not family.window_period:
                pattern = self._pattern()
            found["layer_types"] = [_WINDOWED if windowed else _WHOLE for windowed in pattern]
        elif window:
            found["sliding_window"] = int(window)
        elif family.window_period is not None:
            found["layer_types"] = [_WHOLE] * self.layers
            if not has_kinds:  # else transformers wants a number, which no layer takes
                found["sliding_window"] = None
        own = {"rope_type": "default", "rope_theta": rope["rope_theta"] if base is None else decimal(base)}
        if has_kinds:
            rope = {_WHOLE: rope, _WINDOWED: own}
        elif own["rope_theta"] != rope["rope_theta"]:
            raise self.unread(f"other rotary embeddings in layers with windows ({ROPE_BASE}_swa)")
        if "original_max_position_embeddings" in rope:  # of Phi-3, which looks for it here
            found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        return {**found, "rope_parameters": rope}

    def _has(self, name: str) -> bool:
        """Tell whether the file has a tensor in any decoder layer, by its name without the layer's prefix."""
        return any(layer_in_file(layer, name) in self.shapes for layer in range(self.layers))

    def _pattern(self) -> list[bool]:
        """Tell of every layer whether its attention sees a sliding window of the text only."""
        said, layers = self.entry(WINDOW_PATTERN), self.layers
        if isinstance(said, int) and not isinstance(said, bool):  # of so many layers the last attends to all
            return [(layer + 1) % said != 0 for layer in range(layers)]
        if said is None:  # llama.cpp's rule for the family, which is that of transformers
            kinds = self._config_with(num_hidden_layers=layers).layer_types
            return [kind == _WINDOWED for kind in kinds]
        if not isinstance(said, list) or len(said) != layers:
            raise self.unread(f"windows in other layers than {WINDOW_PATTERN} has place for")
        return list(map(bool, said))

    def _check_fixed(self) -> None:
        """Raise `InvalidInputError` where metadata say otherwise than those of all models of the family."""
        for own, known in self.family.fixed.items():
            said = self.entry(own)
            if said is not None and not math.isclose(float(said), float(known), rel_tol=1e-6):
                raise self.unread(f"{self.family.architecture}.{own} = {said} where others have {known}")
        self.asked.update(self.family.derived)
