"""A dense model to be converted: its feed-forward networks by role, its numbers, and what its layers do."""

import math
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.architectures.dense import DenseArchitecture
from moetool.checkpoint.promises import check_shape, lacking
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import model_config
from moetool.errors import InvalidInputError
from moetool.format.entry import check_unquantized
from moetool.format.families import dense_architecture_of
from moetool.runtime.building import in_whole

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class DenseModel:
    """A dense checkpoint whose headers agree with its config.

    Attributes:
        checkpoint: where it lies. Tensors of a bare decoder have the names that they have in the language model.
        architecture: what is known of it.
        hidden, intermediate: widths of the FFN, the same in every layer that has one.
        layers: number of decoder layers.
        ffn_layers: those of them that have an FFN.

    Raises:
        InvalidInputError: the family is not known, or a tensor of an FFN is missing, of another shape, or of fewer than
            16 bits.
    """

    def __init__(self, checkpoint: Checkpoint, *, may_lie_within: bool = False) -> None:
        """With `may_lie_within` also of one that is the language model of one that sees or hears."""
        self.architecture: DenseArchitecture = dense_architecture_of(checkpoint.config, may_lie_within=may_lie_within)
        start = self.architecture.layer.partition(".")[0]
        is_bare = all(name.partition(".")[0] != start for name in checkpoint.tensors)
        self.checkpoint = in_whole(checkpoint) if is_bare else checkpoint
        check_unquantized(checkpoint.config)
        self.layers, self.ffn_layers = self.architecture.layers, self.architecture.ffn_layers
        named = [self.architecture.weight_name(at, role) for at in self.ffn_layers for role in self.architecture.roles]
        if missing := [name for name in named if name not in self.checkpoint.tensors]:
            promise = f" It is that of a dense model ({self.architecture.model_types[0]})."
            raise lacking(self.checkpoint.source, missing, self.checkpoint.tensors, promise)
        first = self.architecture.weight_name(self.ffn_layers[0], "down")
        down = self.checkpoint.info(first).shape
        if len(down) != 2:
            raise InvalidInputError(f"{first} is no matrix: {list(down)}.")
        self.hidden, self.intermediate = self._turned(down)
        for layer in self.ffn_layers:
            for role in self.architecture.roles:
                name = self.architecture.weight_name(layer, role)
                rows, columns = self.shape(role)
                if role != "down" and self.architecture.is_joined:
                    rows *= 2
                found = self.checkpoint.info(name).shape
                check_shape(self.checkpoint.source, name, found, self._turned((rows, columns)), by=first)

    @cached_property
    def config(self) -> "PreTrainedConfig":
        """transformers' config of the model, defaults filled in. Raises `InvalidInputError`."""
        return model_config(self.checkpoint.config, self.checkpoint.path).get_text_config()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the feed-forward networks are stored."""
        return self.checkpoint.info(self.architecture.weight_name(self.ffn_layers[0], "down")).dtype

    @property
    def parameters(self) -> int:
        """Number of elements in all tensors of the model's files."""
        return sum(math.prod(info.shape) for info in self.checkpoint.tensors.values())

    @property
    def head_dim(self) -> int:
        """Number of channels of one attention head."""
        heads = int(getattr(self.config, "num_attention_heads", None) or 1)
        return int(getattr(self.config, "head_dim", None) or self.hidden // heads)

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Features of the model's layers that a plain Llama lacks, by the names of `FEATURES`."""
        found = list(self.architecture.features)
        found += [name for key, name in self.architecture.optional_features.items() if getattr(self.config, key, False)]
        if "own_block" in found:
            return tuple(found)  # whatever else its layers do
        window = getattr(self.config, "sliding_window", None)
        if getattr(self.config, "use_sliding_window", True) and window and "mixed_attention" not in found:
            kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention"])
            if kinds != {"full_attention"}:
                found.append("sliding_window" if kinds == {"sliding_attention"} else "mixed_attention")
        rope = getattr(self.config, "rope_parameters", None) or {}
        if self.head_dim * self.config.num_attention_heads != self.hidden:
            found.append("head_dim")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            found.append("partial_rotary")
        return tuple(found)

    def shape(self, role: Role) -> tuple[int, int]:
        """The shape `[out, in]` of the feed-forward matrix of a role."""
        return (self.hidden, self.intermediate) if role == "down" else (self.intermediate, self.hidden)

    @property
    def biases(self) -> tuple[Role, ...]:
        """Roles whose matrices have a bias beside them in the files."""
        architecture = self.architecture
        held, layer = self.checkpoint.tensors, self.ffn_layers[0]
        return tuple(role for role in architecture.roles if architecture.bias_name(layer, role) in held)

    def matrix(self, layer: int, role: Role) -> Tensor:
        """Read the matrix `[out, in]` of a layer and role, in the dtype that it is stored in."""
        name = self.architecture.weight_name(layer, role)
        if self.architecture.is_transposed:
            return self.checkpoint.read(name).t().contiguous()
        if role == "down" or not self.architecture.is_joined:
            return self.checkpoint.read(name)
        start = self.intermediate if role == "up" else 0
        return self.checkpoint.read_rows(name, start, start + self.intermediate)

    def bias(self, layer: int, role: Role) -> Tensor:
        """Read the bias `[out]` beside the matrix of a layer and role."""
        return self.checkpoint.read(self.architecture.bias_name(layer, role))

    def ffn_names(self, layer: int) -> set[str]:
        """Names on disk of the matrices and biases of one layer's FFN."""
        roles = self.architecture.roles
        found = {self.architecture.weight_name(layer, role) for role in roles}
        return found | {self.architecture.bias_name(layer, role) for role in self.biases}

    def may_lack(self, name: str) -> bool:
        """Whether a checkpoint of such a model may or may not store a tensor: it follows from the config, or from the
        embeddings."""
        tied = bool(self.config.tie_word_embeddings) and name == "lm_head.weight"
        return tied or name.endswith("inv_freq")

    def _turned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape `[out, in]` as it is on disk, and back."""
        return shape[::-1] if self.architecture.is_transposed else shape
