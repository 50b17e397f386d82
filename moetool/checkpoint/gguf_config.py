"""`config.json` of the model in a GGUF file, from the file's metadata.

What a family's description says of metadata is undone here: whole numbers, fractions and words go back to their
entries, rotary embeddings and windows to what transformers calls them.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moetool.errors import InvalidInputError
from moetool.format.gguf.family import GgufFamily
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
    LONG_ROPE_FACTORS,
    PREDICTORS,
    ROPE_BASE,
    ROPE_FACTORS,
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

_SCALING = "rope.scaling."
_WINDOWED, _WHOLE, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_LEADING = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
# Said of a model elsewhere, too, or of nothing that transformers computes.
_UNNEEDED = {"vocab_size", SHARED_WIDTH, *HEAD_WIDTHS[1:], f"{_SCALING}finetuned", f"{_SCALING}yarn_ext_factor"}
_TOKENS = ("bos", "eos", "pad")
_TOLERANCE = 1e-4  # of factors by pair of channels, relative


@dataclass(frozen=True)
class GgufConfig:
    """The config of the model in a GGUF file.

    Attributes:
        file: where it lies.
        family: of the model.
        entries: metadata of the architecture, without its name, by key.
        shapes: shape of every tensor, as torch has it, by GGUF's name.
        read: gives a tensor in fp32 by GGUF's name.
        dtype: of the checkpoint's weights.
        tokens: ids of special tokens that the file names, by what they are ("bos").
    """

    file: Path
    family: GgufFamily
    entries: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    dtype: torch.dtype
    tokens: Mapping[str, int]
    _asked: set[str] = field(default_factory=set, repr=False)

    def _entry(self, key: str) -> Any:
        """An entry of the metadata; `None` if there is none."""
        self._asked.add(key)
        return self.entries.get(key)

    def _number(self, key: str) -> Any:
        """An entry that there has to be, one for all layers."""
        if (value := self._entry(key)) is None:
            raise InvalidInputError(f"{self.file} lacks {self.family.architecture}.{key} in its metadata.")
        if isinstance(value, list):
            if len({*value}) != 1:
                raise self._unread(f"layers that differ in {key}")
            return value[0]
        return value

    def _unread(self, what: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self.file} has {what}, which moetool does not read from GGUF. Take the model's own checkpoint."
        )

    @cached_property
    def layers(self) -> int:
        """Number of decoder layers, without those that predict further tokens."""
        return int(self._number(COUNTS["num_hidden_layers"])) - int(self._entry(PREDICTORS) or 0)

    def build(self) -> dict[str, object]:
        """The entries of `config.json`.

        Raises:
            InvalidInputError: metadata are missing, or say what moetool does not read.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        family, known = self.family, self._defaults
        said: dict[str, object] = {
            "hidden_act": "silu",
            "tie_word_embeddings": HEAD not in self.shapes,
            "vocab_size": self.shapes[EMBEDDINGS][0],
            "head_dim": self._head_width,
        }
        said |= {**self._numbers(), "num_hidden_layers": self.layers, "num_nextn_predict_layers": 0}
        said |= self._widths()
        said |= self._attention()
        said |= {key: values[0] for key, values in family.computes.items()}
        said |= {f"{kind}_token_id": self.tokens.get(kind) for kind in _TOKENS}
        self._check_fixed()
        found: dict[str, object] = {
            "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]],
            "model_type": family.model_type,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        found |= {known.attribute_map.get(key, key): value for key, value in said.items() if hasattr(known, key)}
        found |= {key: value(found) for key, value in family.implied.items()}
        if others := sorted(self.entries.keys() - self._asked - _UNNEEDED):
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
        return made

    def _numbers(self) -> dict[str, object]:
        """Entries that metadata have as they are, or in other words."""
        family, found = self.family, dict[str, Any]()
        for key, own in {**COUNTS, **family.counts}.items():
            if key == "vocab_size" or own in family.derived:
                continue
            if key == "num_key_value_heads" and self._entry(own) is None:  # as many as heads of queries
                own = COUNTS["num_attention_heads"]
            if key in COUNTS or self._entry(own) is not None:
                found[key] = int(self._number(own))
            else:
                found[key] = self._shared_count() if own == SHARED_COUNT else None
        for key, own in {**FRACTIONS, **family.multipliers}.items():
            if (value := self._entry(own)) is not None:
                found[key] = _decimal(value)
            elif key in FRACTIONS and not any("epsilon" in other for other in family.multipliers.values()):
                self._number(own)
        for key, own in family.of_layers.items():
            if (values := self._entry(own)) is not None:
                found[key] = list(map(_decimal, values))
        found |= {key: bool(self._number(own)) for key, own in family.flags.items()}
        for key, (own, numbers) in family.choices.items():
            said = self._number(own)
            if (word := next((word for word, number in numbers.items() if number == said), None)) is None:
                raise self._unread(f"{own} = {said}")
            found[key] = word
        for own, (one, other) in family.products.items():
            product = int(self._number(own))
            found[one] = product // found[other] if other in found else product
        return found

    def _shared_count(self) -> int | None:
        """Number of experts that the shared one is as wide as; `None` where there is none."""
        shared, each = self._entry(SHARED_WIDTH), self._entry(EXPERT_WIDTH)
        return int(shared) // int(each) if shared and each else None

    @cached_property
    def _head_width(self) -> int:
        own, heads = self._entry(HEAD_WIDTHS[0]), self._number(COUNTS["num_attention_heads"])
        return int(own or self._number(COUNTS["hidden_size"]) // heads)

    def _widths(self) -> dict[str, object]:
        family = self.family
        width = int(self._number(WIDTH))
        if not family.is_moe:
            return {"intermediate_size": width}
        found: dict[str, object] = {
            family.dense_width: width,
            family.experts_key: int(self._number(EXPERT_COUNT)),
            "num_experts_per_tok": int(self._number(EXPERTS_USED)),
        }
        if family.width_key != WIDTH:
            found["moe_intermediate_size"] = int(self._number(family.width_key))
        if family.shared_width is not None:
            found[family.shared_width] = int(self._number(SHARED_WIDTH))
        if family.leads_dense:
            found |= self._dense_layers()
        if family.groups_experts:
            groups = (int(self._entry(own) or 1) for own in GROUPS)
            found |= dict(zip(("n_group", "topk_group"), groups, strict=True))
        return found

    def _dense_layers(self) -> dict[str, object]:
        """Entries that say how many layers lead without experts, by all names that families have for it."""
        self._asked.add(DENSE_LAYERS)  # of which not every converter writes it
        routers = (layer_in_file(layer, "ffn_gate_inp.weight") in self.shapes for layer in range(self.layers))
        count = next((layer for layer, has_router in enumerate(routers) if has_router), self.layers)
        kinds = ["dense" if layer < count else "sparse" for layer in range(self.layers)]
        return {**dict.fromkeys(_LEADING, count), "mlp_layer_types": kinds}

    def _attention(self) -> dict[str, object]:
        """Entries of biases, windows and rotary embeddings."""
        family, rope, found = self.family, self._rope(), dict[str, object]()
        if family.biases:
            found["attention_bias"] = layer_in_file(0, "attn_q.bias") in self.shapes
        if family.has_head_norms:
            found["use_qk_norm"] = layer_in_file(0, "attn_q_norm.weight") in self.shapes
        if family.attention_interval is not None:
            step = int(self._number(family.attention_interval))
            found["layer_types"] = [_LINEAR if (layer + 1) % step else _WHOLE for layer in range(self.layers)]
        window, base = self._entry(WINDOW), self._entry(f"{ROPE_BASE}_swa")
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
        own = {"rope_type": "default", "rope_theta": rope["rope_theta"] if base is None else _decimal(base)}
        if has_kinds:
            rope = {_WHOLE: rope, _WINDOWED: own}
        elif own["rope_theta"] != rope["rope_theta"]:
            raise self._unread(f"other rotary embeddings in layers with windows ({ROPE_BASE}_swa)")
        if "original_max_position_embeddings" in rope:  # of Phi-3, which looks for it here
            found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        return {**found, "rope_parameters": rope}

    def _pattern(self) -> list[bool]:
        """Tell of every layer whether its attention sees a sliding window of the text only."""
        said, layers = self._entry(WINDOW_PATTERN), self.layers
        if isinstance(said, int) and not isinstance(said, bool):  # of so many layers the last attends to all
            return [(layer + 1) % said != 0 for layer in range(layers)]
        if said is None:  # llama.cpp's rule for the family, which is that of transformers
            kinds = self._config_with(num_hidden_layers=layers).layer_types
            return [kind == _WINDOWED for kind in kinds]
        if not isinstance(said, list) or len(said) != layers:
            raise self._unread(f"windows in other layers than {WINDOW_PATTERN} has place for")
        return list(map(bool, said))

    def _rope(self) -> dict[str, Any]:
        """The parameters of rotary embeddings, of layers that attend to all of a text."""
        kind = self._entry(f"{_SCALING}type")
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _decimal(self._entry(ROPE_BASE) or 10000.0)}
        turned = self._entry(HEAD_WIDTHS[2])
        if self.family.is_partial and turned is not None:
            rope["partial_rotary_factor"] = int(turned) / self._head_width
        if self.family.axes and (axes := self._entry("rope.dimension_sections")):
            rope["mrope_section"] = [pairs for pairs in axes if pairs]
        if ROPE_FACTORS in self.shapes:
            return {**rope, **self._slowed(rope["rope_theta"])}
        if LONG_ROPE_FACTORS["long_factor"] in self.shapes:
            rope |= {key: list(map(_decimal, self.read(own).tolist())) for key, own in LONG_ROPE_FACTORS.items()}
            rope["original_max_position_embeddings"] = int(self._number(f"{_SCALING}original_context_length"))
            strength = _decimal(self._number(f"{_SCALING}attn_factor"))
            return {**rope, "rope_type": "longrope", "attention_factor": strength}
        if kind in (None, "none"):
            return rope
        if kind not in ("linear", "yarn"):
            raise self._unread(f"rotary embeddings of a kind ({kind})")
        rope |= {"rope_type": kind, "factor": _decimal(self._number(f"{_SCALING}factor"))}
        return rope if kind == "linear" else {**rope, **self._yarn(rope["factor"])}

    def _yarn(self, factor: float) -> dict[str, object]:
        """Further parameters of YaRN; llama.cpp multiplies embeddings by attn_factor · (1 + ln(factor) / 10)."""
        found: dict[str, object] = {
            "original_max_position_embeddings": int(self._number(f"{_SCALING}original_context_length"))
        }
        for key in ("beta_fast", "beta_slow"):
            if (value := self._entry(f"{_SCALING}yarn_{key}")) is not None:
                found[key] = _decimal(value)
        if (strength := self._entry(f"{_SCALING}attn_factor")) is not None:
            found["attention_factor"] = _decimal(strength * (1 + 0.1 * math.log(max(factor, 1.0))))
        if (strength := self._entry(f"{_SCALING}yarn_attn_factor")) is not None:  # as llama.cpp's converter writes it
            found["attention_factor"] = _decimal(strength)
        if self._entry(f"{_SCALING}yarn_log_multiplier"):
            raise self._unread("scores of attention that YaRN multiplies (yarn_log_multiplier)")
        if (warmth := self._entry("attention.temperature_scale")) is not None:
            found["llama_4_scaling_beta"] = _decimal(warmth)
            self._entry("attention.temperature_length")
        return found

    def _slowed(self, base: float) -> dict[str, object]:
        """Llama 3's parameters of the factors by which each pair of channels turns slower.

        A pair whose wavelength is w turns slower by factor if w > original / low_freq_factor, not at all if w <
        original / high_freq_factor, and in between by 1 / ((1 - s) / factor + s), with s = (original / w -
        low_freq_factor) / (high_freq_factor - low_freq_factor). The three scale together: low_freq_factor is 1 here.
        Source: transformers, `modeling_rope_utils.py`.
        """
        factors = self.read(ROPE_FACTORS).double()
        steps = torch.arange(len(factors), dtype=torch.float64) / len(factors)
        lengths = 2 * math.pi * base**steps
        factor = _decimal(float(factors.max()))
        shares = (1 / factors - 1 / factor) / (1 - 1 / factor) if factor > 1 else torch.ones_like(factors)
        between = (shares > _TOLERANCE) & (shares < 1 - _TOLERANCE)
        high, count = 4.0, int(between.sum())
        if count > 1:  # s = a / w - b
            columns = torch.stack([1 / lengths[between], -torch.ones(count, dtype=torch.float64)], dim=1)
            a, b = torch.linalg.lstsq(columns, shares[between, None]).solution[:, 0].tolist()
            high, original = round(1 + 1 / b, 3), round(a / b)
        elif count:
            original = round(float(lengths[between] * (1 + (high - 1) * shares[between])))
        else:  # any length between the longest that turns as it did and the shortest that is slowed down
            least = high * max([1.0, *lengths[shares >= 0.5].tolist()])
            original = round(math.sqrt(least * min([4 * least, *lengths[shares < 0.5].tolist()])))
        found = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
        expected = ((original / lengths - 1) / (high - 1)).clamp(0, 1)
        if bool(((1 / ((1 - expected) / factor + expected)) / factors - 1).abs().max() > _TOLERANCE):
            raise self._unread(f"rotary embeddings that are not slowed down as Llama 3's ({ROPE_FACTORS})")
        return {"rope_type": "llama3", **found, "original_max_position_embeddings": original}

    def _check_fixed(self) -> None:
        """Raise `InvalidInputError` where metadata say otherwise than those of all models of the family."""
        for own, known in self.family.fixed.items():
            said = self._entry(own)
            if said is not None and not math.isclose(float(said), float(known), rel_tol=1e-6):
                raise self._unread(f"{self.family.architecture}.{own} = {said} where others have {known}")
        self._asked.update(self.family.derived)


def _decimal(value: float) -> float:
    """A fraction that was kept in fp32 as people write it: 1e-5, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
