"""A dense model to be converted: its feed-forward networks by role, its numbers, and what its layers do."""

import math
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.architectures.dense import DenseArchitecture
from moetool.checkpoint.header import check_dtype
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import model_config
from moetool.errors import InvalidInputError
from moetool.format.entry import check_unquantized
from moetool.format.families import dense_architecture_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class DenseModel:
    """A checkpoint of a known dense family whose headers agree with its config.

    Attributes:
        checkpoint: where it lies.
        architecture: its family.
        hidden, intermediate: widths of the FFN, the same in every layer.
        layers: number of decoder layers.

    Raises:
        InvalidInputError: the family is not known, or a tensor of an FFN is missing, of another shape, or of fewer than
            16 bits.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.architecture: DenseArchitecture = dense_architecture_of(checkpoint.config)
        check_unquantized(checkpoint.config)
        self.layers = int(self.config.num_hidden_layers)
        down = self.checkpoint.info(self.architecture.weight_name(0, "down")).shape
        if len(down) != 2:
            raise InvalidInputError(f"{self.architecture.weight_name(0, 'down')} is no matrix: {list(down)}.")
        self.hidden, self.intermediate = down
        for layer in range(self.layers):
            for role in self.architecture.roles:
                name = self.architecture.weight_name(layer, role)
                rows, columns = self.shape(role)
                if role != "down" and self.architecture.is_joined:
                    rows *= 2
                found = self.checkpoint.info(name).shape
                if found != (rows, columns):
                    raise InvalidInputError(f"Tensor {name} has shape {list(found)}; expected {[rows, columns]}.")
                check_dtype(f"The numbers of {name}", self.checkpoint.info(name).dtype)

    @cached_property
    def config(self) -> "PreTrainedConfig":
        """transformers' config of the model, defaults filled in. Raises `InvalidInputError`."""
        return model_config(self.checkpoint.config, self.checkpoint.path)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the FFNs."""
        return self.checkpoint.info(self.architecture.weight_name(0, "down")).dtype

    @property
    def parameters(self) -> int:
        """The number of elements in all tensors of the model."""
        return sum(math.prod(info.shape) for info in self.checkpoint.tensors.values())

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return int(getattr(self.config, "head_dim", None) or self.hidden // self.config.num_attention_heads)

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Features of the model's layers that a plain Llama lacks, by the names of `FEATURES`."""
        found = list(self.architecture.features)
        found += [name for key, name in self.architecture.optional_features.items() if getattr(self.config, key, False)]
        window = getattr(self.config, "sliding_window", None)
        if getattr(self.config, "use_sliding_window", True) and window and "mixed_attention" not in found:
            kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention"])
            if kinds != {"full_attention"}:
                found.append("sliding_window" if kinds == {"sliding_attention"} else "mixed_attention")
        rope = getattr(self.config, "rope_parameters", None) or {}
        if "own_block" not in found:
            if self.head_dim * self.config.num_attention_heads != self.hidden:
                found.append("head_dim")
            if rope.get("partial_rotary_factor", 1.0) != 1.0:
                found.append("partial_rotary")
        return tuple(found)

    def shape(self, role: Role) -> tuple[int, int]:
        """Shape `[out, in]` of one matrix."""
        return (self.hidden, self.intermediate) if role == "down" else (self.intermediate, self.hidden)

    @property
    def biases(self) -> tuple[Role, ...]:
        """The matrices with a bias beside them."""
        architecture = self.architecture
        return tuple(role for role in architecture.roles if architecture.bias_name(0, role) in self.checkpoint.tensors)

    def matrix(self, layer: int, role: Role) -> Tensor:
        """One matrix `[out, in]`, in the dtype it is stored in."""
        name = self.architecture.weight_name(layer, role)
        if role == "down" or not self.architecture.is_joined:
            return self.checkpoint.read(name)
        start = self.intermediate if role == "up" else 0
        return self.checkpoint.read_rows(name, start, start + self.intermediate)

    def bias(self, layer: int, role: Role) -> Tensor:
        """The bias `[out]` beside a matrix."""
        return self.checkpoint.read(self.architecture.bias_name(layer, role))

    def ffn_names(self, layer: int) -> set[str]:
        """Names on disk of everything in one layer's FFN."""
        if self.architecture.spread is not None:
            roles = self.architecture.roles
            found = {self.architecture.weight_name(layer, role) for role in roles}
            return found | {self.architecture.bias_name(layer, role) for role in self.biases}
        prefix = self.architecture.ffn_prefix(layer)
        return {name for name in self.checkpoint.tensors if name.startswith(prefix)}
