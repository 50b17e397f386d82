"""Facts of a model apart from its tensors, as a GGUF file states them: heads, widths, windows, rotary embeddings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from moetool.architectures import Architecture
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import model_config
from moetool.format.gguf.family import GgufFamily
from moetool.format.gguf.words import EMBEDDINGS, HEAD, layer_in_file, layer_of
from moetool.runtime.dense import DenseModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Kinds of layers (`layer_types`).
WINDOWED, WHOLE = "sliding_attention", "full_attention"
LINEAR, INDEXED = "linear_attention", "indexed_attention"
COMPRESSED = "compress"  # rotary embeddings of layers that compress a text, and of what they compress it to


@dataclass(frozen=True)
class GgufFacts:
    """Facts of an MoE or dense model of a family that llama.cpp knows, by its config and the shapes of its tensors.

    Attributes:
        checkpoint: where it lies, with matrices in the place of codes beside its experts.
        family: as llama.cpp computes it.
        dense: of a model without experts.
        experts: of one that has some.
    """

    checkpoint: Checkpoint
    family: GgufFamily
    dense: DenseModel | None
    experts: ExpertReader | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the model's weights."""
        model = self.dense or self.experts
        assert model is not None
        return model.dtype

    @cached_property
    def config(self) -> "PreTrainedConfig":
        """transformers' config of the language model, defaults filled in. Raises `InvalidInputError`."""
        text = self.whole_config.get_text_config()
        if getattr(text, "per_layer_config", None):  # what most layers have, where transformers asks which one is meant
            text.allow_global_per_layer_attribute_access = True
        if self.family.turns_by_layer and (bases := [base for base in text.layer_rope_theta if base]):
            text.rope_parameters["rope_theta"] = bases[0]  # which the layers override
        return text

    @cached_property
    def whole_config(self) -> "PreTrainedConfig":
        """transformers' config of the language model and all that lies around it."""
        return model_config(self.checkpoint.config, self.checkpoint.path)

    def config_of(self, layer: int) -> "PreTrainedConfig":
        """The config of a layer, where some layers have entries of their own; of the first for -1, what lies outside of
        layers."""
        own: PreTrainedConfig = self.config.per_layer_config[max(layer, 0)]
        return own

    @property
    def is_within(self) -> bool:
        """Whether the language model lies in a model that sees or hears, too."""
        return self.whole_config.get_text_config() is not self.whole_config

    @property
    def moe(self) -> Architecture | None:
        """The architecture of a model with experts; `None` for a dense model."""
        return None if self.experts is None else self.experts.architecture

    @property
    def layer(self) -> str:
        """The prefix of a layer's tensors in the checkpoint, a template with `{layer}` for its index."""
        if self.moe is not None:
            return self.moe.layer
        return self.dense.architecture.layer if self.dense is not None and self.is_within else self.family.layer

    @property
    def layers(self) -> int:
        """Number of decoder layers, by the model's config."""
        return int(self.config.num_hidden_layers)

    @property
    def kinds(self) -> Sequence[str]:
        """Of each layer, what its attention is (`layer_types`); empty if the config does not say."""
        return getattr(self.config, "layer_types", None) or ()

    @property
    def dense_layers(self) -> int:
        """Number of layers without experts before the first that has some; 0 for a dense model."""
        return 0 if self.experts is None else self.experts.moe_layers[0]

    def layer_prefix(self, layer: int) -> str:
        """The beginning of the names of a layer's tensors in the checkpoint, with its dot."""
        return f"{self.layer.format(layer=layer)}."

    @cached_property
    def names_in_file(self) -> Mapping[str, str]:
        """GGUF's names of the checkpoint's tensors, by their own, but for experts and what the family changes."""
        return self.family.in_file(self.layers, self.moe, self.layer, self.kinds)

    @property
    def embeddings_name(self) -> str:
        """Name of the token embeddings' matrix in the checkpoint."""
        return self._name_of(EMBEDDINGS)

    @property
    def head_name(self) -> str:
        """The checkpoint's name of the model's head, whether it is there or tied."""
        return self._name_of(HEAD)

    def _name_of(self, own: str) -> str:
        """The checkpoint's name of a tensor of the file: of several that it may have, the one that is there."""
        names = [name for name, there in self.names_in_file.items() if there == own]
        return next((name for name in names if name in self.checkpoint.tensors), names[0])

    @property
    def key_heads(self) -> int:
        """Return the number of heads of keys and values that most layers have."""
        return self.family.key_heads(self.config)

    @cached_property
    def is_tied(self) -> bool:
        """Whether the model's head shares the matrix of its embeddings, as the config of the whole model says: where a
        checkpoint has both and they differ, transformers shares none."""
        if self.head_name not in self.checkpoint.tensors:
            return True
        is_said = self.family.may_tie and getattr(self.whole_config, "tie_word_embeddings", False)
        return is_said and (self.checkpoint.is_imagined or self._is_same(self.head_name, self.embeddings_name))

    def _is_same(self, name: str, other: str) -> bool:
        """Whether two tensors of the checkpoint have the same numbers: transformers ties no others."""
        if self.checkpoint.info(name).shape != self.checkpoint.info(other).shape:
            return False
        pairs = zip(self.checkpoint.blocks(name), self.checkpoint.blocks(other), strict=True)
        return all(torch.equal(one, two) for one, two in pairs)

    @cached_property
    def heads_in_file(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values: of latent attention one, as llama.cpp computes it."""
        heads = max(self.query_heads)
        if self.heads_by_layer is not None:
            return heads, max(self.heads_by_layer)
        return heads, 1 if self.family.is_latent else self.key_heads

    @cached_property
    def query_heads(self) -> list[int]:
        """Heads of queries of each layer, which may differ in Laguna, dots3 and Step 3.5."""
        own = getattr(self.config, "num_attention_heads_per_layer", None)
        return list(own or [int(self.config_of(layer).num_attention_heads) for layer in range(self.layers)])

    @cached_property
    def heads_by_layer(self) -> list[int] | None:
        """Heads of keys and values of each layer, none where it has no attention; `None` if all layers have as many."""
        if not self.family.varies_heads:
            return None
        if self.family.is_latent:
            return [int(kind == WHOLE) for kind in self.config.layer_types]
        if self.family.has_two_widths:
            return [int(self.config_of(layer).num_key_value_heads) for layer in range(self.layers)]
        rows = {
            layer_of(own): self.checkpoint.info(name).shape[0]
            for name, own in self.names_in_file.items()
            if own.endswith("attn_k.weight") and name in self.checkpoint.tensors
        }
        return [rows.get(layer, 0) // self.head_width for layer in range(self.layers)]

    @property
    def head_width(self) -> int:
        """Number of channels of one attention head."""
        own = getattr(self.config, "head_dim", None)
        return int(own or self.config.hidden_size // self.config.num_attention_heads)

    @cached_property
    def whole_width(self) -> int:
        """Number of channels of one attention head in layers that attend to all of a text."""
        if not self.family.has_two_widths or not self.windows or all(self.windows):
            return self.head_width
        layer = self.windows.index(False)
        return self.checkpoint.info(f"{self.layer_prefix(layer)}self_attn.k_norm.weight").shape[0]

    @property
    def attention_interval(self) -> int:
        """How many layers there are for one with attention, which is the last of them."""
        kinds = list(self.config.layer_types)
        return kinds.index(WHOLE) + 1 if WHOLE in kinds else len(kinds) + 1

    @cached_property
    def windows(self) -> list[bool]:
        """Whether each layer attends to a window of the text only; empty if none does, or all do and to more."""
        if self.family.sees_windows:
            return []
        found = [kind == WINDOWED for kind in self.kinds]
        return found if any(found) and getattr(self.config, "sliding_window", None) else []

    @cached_property
    def rope(self) -> Mapping[str, Any]:
        """The parameters of the rotary embeddings, as `config.json` has them; of layers that attend to all of a text,
        where others have parameters of their own."""
        return self._rope_of(WHOLE)

    @cached_property
    def rope_of_windows(self) -> Mapping[str, Any]:
        """The parameters of the rotary embeddings of layers that attend to a window: `rope` itself, unless they have
        their own."""
        return self._rope_of(WINDOWED)

    def _rope_of(self, kind: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = getattr(self.config, "rope_parameters", None) or {}
        if (compressed := found.get(COMPRESSED)) is not None:
            # All layers that are stretched are so alike; the others' base is what metadata calls that of the model.
            return {**compressed, "rope_theta": found["main"]["rope_theta"]}
        return found.get(kind) or (found.get(INDEXED) if kind == WHOLE else None) or found

    @property
    def rotary_share(self) -> float:
        """The part of each head's channels that rotary embeddings turn."""
        own = self.rope.get("partial_rotary_factor", getattr(self.config, "partial_rotary_factor", None))
        return 1.0 if own is None or self.family.is_latent else float(own)

    @property
    def most_turned(self) -> int:
        """Most channels of a head that rotary embeddings turn in any layer; all, where the file holds some still."""
        if self.family.has_two_widths:
            return self.whole_width
        share = float(self.rope_of_windows.get("partial_rotary_factor") or 1.0) if self.windows else 0.0
        return int(self.head_width * max(self.rotary_share, share))

    @cached_property
    def shared_intermediate(self) -> int:
        """Number of neurons of the shared expert; 0 if there is none."""
        if self.experts is None:
            return 0
        if (key := self.family.shared_width) is not None:
            return int(getattr(self.config, key, 0) or 0)
        layer = self.experts.moe_layers[0]
        own = layer_in_file(layer, self.family.shared["down"])
        down = next((name for name, there in self.names_in_file.items() if there == own), None)
        if down is None and self.family.has_shared:
            down = self.experts.architecture.shared_expert_names(layer).get("down")
        return 0 if down is None or down not in self.checkpoint.tensors else self.checkpoint.info(down).shape[1]
