"""Watching experts at work: what each of them is given, computes and, backwards, is blamed for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.calibration.peers import Peers
from moetool.runtime.modules import fused


class Collector(Protocol):
    """Gathers statistics of one MoE layer, one expert and batch at a time."""

    def observe(
        self,
        expert: int,
        windows: Tensor,
        inputs: Tensor,
        gate_up: Tensor,
        activation: Tensor,
        output: Tensor,
    ) -> None:
        """One expert's work on the tokens routed to it.

        Args:
            expert: its index.
            windows: `[routed]` index within the batch of the window each token belongs to, ascending.
            inputs: `[routed, hidden]`.
            gate_up: `[routed, 2 · intermediate]`, without gates `[routed, intermediate]`: products, without biases.
            activation: `[routed, intermediate]`, the input of the down matrix.
            output: `[routed, hidden]`, its product, before it is weighted by the router.
        """

    def observe_sum(self, activations: Tensor) -> None:
        """The experts' activations, weighted and summed, as a shared down base sees them: `[tokens, intermediate]`."""

    def reduce(self, peers: Peers) -> None:
        """After a pass: add up what each process has seen of the windows that are its own."""


@contextmanager
def observed(experts: nn.Module, length: int, collectors: Sequence[Collector]) -> Iterator[None]:
    """Let the fused `experts` of transformers run one by one, in order, before the eyes of `collectors`.

    Every pass over the calibration set uses this forward, with or without collectors, so that all of them see the
    same activations to the last bit. `length` is the number of tokens per window.
    """
    module: Any = experts
    first = fused.entering(experts)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, top_k = top_k_index.shape
        routed_to, order = top_k_index.reshape(-1).sort(stable=True)
        weights = top_k_weights.reshape(-1, 1)
        ends = torch.bincount(routed_to, minlength=module.num_experts).cumsum(0).tolist()
        result = torch.zeros_like(hidden_states)
        summed = hidden_states.new_zeros(tokens, module.intermediate_dim) if collectors else None
        start = 0
        for expert, end in enumerate(ends):
            if start == end:
                continue
            pairs, start = order[start:end], end
            rows = pairs // top_k
            inputs = hidden_states[rows]
            gate_up = F.linear(inputs, first[expert])
            activation = fused.activation(module, expert, gate_up)
            output = F.linear(activation, module.down_proj[expert])
            for collector in collectors:
                collector.observe(expert, rows // length, inputs, gate_up, activation, output)
            if summed is not None:
                summed.index_add_(0, rows, (activation * weights[pairs]).detach().to(summed.dtype))
            output = fused.add_bias(module, "down_proj", expert, output)
            result.index_add_(0, rows, (output * weights[pairs]).to(result.dtype))
        for collector in collectors:
            assert summed is not None
            collector.observe_sum(summed)
        return result

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
