"""Watching experts at work: what each of them is given, computes, and the gradients at its outputs."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moetool.architectures.trying import takes_weighed_inputs
from moetool.calibration.held_experts import ExpertRun, HeldExperts, RoutedBatch
from moetool.calibration.peers import Peers
from moetool.errors import InvalidInputError
from moetool.runtime.modules.fused import given_back, gives_back, on_weighed_inputs

SQUARES_ADD_UP = 1e16  # numbers up to this, of any text: fp32 ends at 3e38
ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden states, indices and weights of the top k


class Collector:
    """Gathers statistics of one MoE layer, one expert and batch at a time.

    Attributes:
        wants_sums: whether `observe_sum` is to be called.
        again: lets the collector observe some experts once more, where they are not all in memory together; set by the
            pass that they were first observed in. It is told which collector: one that held itself would not be freed.
    """

    wants_sums: ClassVar[bool] = False
    again: Callable[["Collector", range], None] | None = None

    def observe(self, expert: int, windows: Tensor, inputs: Tensor, work: ExpertRun) -> None:
        """Hook that sees one expert's work on the tokens routed to it, before the router weighs its output.

        Args:
            expert: its index.
            windows: `[routed]` index of the window each token belongs to, ascending: forwards among all windows of this
                process, backwards within the batch.
            inputs: `[routed, hidden]`.
            work: on them.
        """

    def observe_output(self, expert: int, output: Tensor, weights: Tensor) -> None:
        """Hook that sees an expert's output `[routed, hidden]`, biased, and the routing weights `[routed, 1]`."""

    def at(self, position: int) -> None:
        """Hook that is told the position, among the rows that all experts are given, by batch and then by expert, of
        the next rows to be observed."""

    def observe_inputs(self, inputs: Tensor, routing: RoutedBatch) -> None:
        """Hook that sees the inputs of all experts, each token once: `[tokens, hidden]`; and to which experts the
        tokens of the batch go, and with which weights."""

    def observe_gradients(self, gradients: Tensor) -> None:
        """Backwards: the gradients of what all experts give together, `[tokens, hidden]`."""

    def observe_sum(self, activations: Tensor) -> None:
        """The experts' activations, weighted and summed, as a shared down base sees them: `[tokens, intermediate]`."""

    def reduce(self, peers: Peers) -> None:
        """After a pass: add up what each process has seen of the windows that are its own."""


class LargestNumbers(Collector):
    """Remembers the largest number that experts are given and compute, for a message before moments overflow."""

    def __init__(self) -> None:
        self._found = list[Tensor]()

    def observe(self, expert: int, windows: Tensor, inputs: Tensor, work: ExpertRun) -> None:
        bounds = [torch.stack(torch.aminmax(own.detach())).abs().amax().float() for own in (inputs, work.activation)]
        self._found = [torch.stack([*self._found, *bounds]).amax()]  # a tensor: to read it would wait for the card

    def check(self, layer: int) -> None:
        """Raise `InvalidInputError` if squares of the numbers do not add up in fp32. NaN and infinity are left to what
        reads the layer's outputs."""
        largest = max((found.item() for found in self._found), default=0.0)
        if SQUARES_ADD_UP < largest < math.inf:
            raise too_large(f"Experts of layer {layer} are given or compute numbers up to {largest:.1e}")


def too_large(what: str) -> InvalidInputError:
    """Make the error for numbers whose second moments overflow; `what` says where they are."""
    return InvalidInputError(
        f"{what} on the calibration text, and fp32 cannot add up their squares. Weights are damaged or scaled: take "
        "another copy of the model."
    )


def observe(
    collectors: Sequence[Collector],
    held: HeldExperts,
    routing: RoutedBatch,
    length: int,
    hidden_states: Tensor,
    result: Tensor | None,
    summed: Tensor | None,
    start: int,
) -> None:
    """Run the experts that are in memory, in order, on one batch `[tokens, hidden]`; add their weighted outputs to
    `result` and their weighted activations to `summed`, if these are asked for. `start` is how many rows the experts
    were given in the batches before."""
    tokens_before = start * routing.tokens // len(routing.weights)
    for expert in held.experts:
        pairs, rows = routing.of(expert)
        if not len(pairs):
            continue
        inputs = hidden_states[rows].to(held.device)
        work, weights = held.run(expert, inputs), routing.weights[pairs].to(held.device)
        for collector in collectors:
            collector.at(start + routing.before(expert))
            collector.observe(expert, (tokens_before + rows) // length, inputs, work)
            collector.observe_output(expert, work.output, weights)
        if summed is not None:
            summed.index_add_(0, rows, (work.activation * weights).detach().to(summed))
        if result is not None:
            result.index_add_(0, rows, (work.output * weights).to(result))


@contextmanager
def observed(experts: nn.Module, length: int, collectors: Sequence[Collector]) -> Iterator[None]:
    """Let the fused `experts` of transformers run one by one, in order, before the eyes of `collectors`.

    Every pass over the calibration set uses this forward, with or without collectors, so that all of them see the
    same activations to the last bit. `length` is the number of tokens per window.
    """
    held = HeldExperts.of_layer(experts)
    wanted = [collector for collector in collectors if collector.wants_sums]
    rows = 0

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        nonlocal rows
        routing = RoutedBatch(top_k_index, top_k_weights, len(held.experts))
        for collector in collectors:
            collector.observe_inputs(hidden_states, routing)
        # A node of its own, at which the experts' gradients meet before those of router and shared expert join them.
        given = hidden_states.view_as(hidden_states)
        result = torch.zeros_like(hidden_states)
        summed = hidden_states.new_zeros(len(hidden_states), held.intermediate) if wanted else None
        observe(collectors, held, routing, length, given, result, summed, rows)
        rows += top_k_index.numel()
        for collector in wanted:
            assert summed is not None
            collector.observe_sum(summed)
        if result.requires_grad:
            for collector in collectors:
                result.register_hook(collector.observe_gradients)
        return result

    with replaced(experts, forward):
        yield


@contextmanager
def replaced(experts: nn.Module, forward: ExpertsForward) -> Iterator[None]:
    """Let another function stand in for the forward of the fused `experts`, those that have matrices."""
    module: Any = experts

    def with_given_back(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return forward(hidden, chosen, weights) + given_back(hidden, chosen, weights, len(module.down_proj))

    if takes_weighed_inputs(experts):
        module.forward = lambda given: on_weighed_inputs(forward, given, module.num_experts)
    elif gives_back(experts):
        module.forward = with_given_back
    else:
        module.forward = forward
    try:
        yield
    finally:
        del module.forward
