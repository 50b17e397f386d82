"""Experts of a layer that run one by one, each read from the checkpoint when it is its turn and forgotten after it."""

import torch
from torch import Tensor, nn

from moetool.calibration.held_experts import HeldExperts, RoutedBatch
from moetool.checkpoint.experts import ExpertReader
from moetool.runtime.modules.fused import given_back, gives_back, on_weighed_inputs


class DiskExperts:
    """Stands in for the forward of transformers' fused experts: memory holds one expert, however many there are.

    Attributes:
        tokens: `[experts]` int64, how many tokens each expert was given so far.
    """

    def __init__(
        self, native: nn.Module, reader: ExpertReader, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._native, self._reader, self._layer, self._dtype, self._device = native, reader, layer, dtype, device
        self.tokens = torch.zeros(reader.shape.experts, dtype=torch.int64)

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        if top_k_index is None or top_k_weights is None:
            return on_weighed_inputs(self, hidden_states, len(self.tokens))
        result = torch.zeros_like(hidden_states)
        routing = RoutedBatch(top_k_index, top_k_weights, len(self.tokens))
        for expert in range(len(self.tokens)):
            pairs, rows = routing.of(expert)
            if not len(pairs):
                continue
            self.tokens[expert] += len(pairs)
            one = range(expert, expert + 1)
            held = HeldExperts.read(self._native, self._reader, self._layer, one, self._dtype, self._device)
            output = held.run(expert, hidden_states[rows]).output
            result.index_add_(0, rows, (output * routing.weights[pairs]).to(result.dtype))
        if gives_back(self._native):
            result += given_back(hidden_states, top_k_index, top_k_weights, len(self.tokens))
        return result
