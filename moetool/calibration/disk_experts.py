"""Experts of a layer that run one by one, each read from the checkpoint when it is its turn and forgotten after it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures import Role
from moetool.checkpoint.experts import ExpertReader
from moetool.runtime.modules import fused


class DiskExperts:
    """Stands in for the forward of transformers' fused experts: memory holds one expert, however many there are.

    Attributes:
        tokens: `[experts]` int64, how many tokens each expert was given so far.
        mass: `[experts]` fp64, the routing weights of these, summed.
    """

    def __init__(
        self, native: nn.Module, reader: ExpertReader, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._native: Any = native
        self._reader, self._layer, self._dtype, self._device = reader, layer, dtype, device
        self.tokens = torch.zeros(reader.shape.experts, dtype=torch.int64)
        self.mass = torch.zeros(reader.shape.experts, dtype=torch.float64)

    def _matrix(self, expert: int, role: Role) -> Tensor:
        return self._reader.dense(self._layer, expert, role).to(self._device, self._dtype)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(self._reader.shape.experts):
            tokens, slot = torch.where(top_k_index == expert)
            if not len(tokens):
                continue
            weights = top_k_weights[tokens, slot, None]
            self.tokens[expert] += len(tokens)
            self.mass[expert] += weights.double().sum().cpu()
            inputs = hidden_states[tokens]
            roles = self._reader.shape.entering
            gate_up = torch.cat([F.linear(inputs, self._matrix(expert, role)) for role in roles], dim=-1)
            activation = fused.activation(self._native, expert, gate_up)
            output = F.linear(activation, self._matrix(expert, "down"))
            output = fused.add_bias(self._native, "down_proj", expert, output)
            result.index_add_(0, tokens, (output * weights).to(result.dtype))
        return result
