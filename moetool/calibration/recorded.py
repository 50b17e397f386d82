"""A layer whose experts do not fit into memory together, on the way of the calibration set through it.

The layer runs with experts that only note what they are given; then the experts run on that, a working set after the
other, each read once; then the layer runs again, with experts that answer from what was noted. Backwards likewise. The
sums over a token's experts are formed in the same order as where all are in memory.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moetool.calibration.held_experts import RoutedBatch
from moetool.calibration.observation import Collector, observe, replaced
from moetool.checkpoint.files import storage_errors

if TYPE_CHECKING:
    from moetool.calibration.streaming import StreamedModel

Tick = Callable[[], None]


class Recorded:
    """Inputs `[tokens, hidden]` of a layer's experts, recorded by batch, with the experts that each token goes to.

    Attributes:
        parts: the tokens of each batch.
    """

    def __init__(
        self, model: "StreamedModel", index: int, native: nn.Module, directory: Path, tokens: int, length: int
    ) -> None:
        """Of layer `index` with the fused experts `native`, on so many tokens in windows of `length`; large tensors are
        files in `directory`."""
        assert model.experts is not None
        self._model, self._index, self._native, self._directory = model, index, native, directory
        self._shape, self._tokens, self._length = model.experts.shape, tokens, length
        self._inputs = torch.empty(0)
        self._routings: list[RoutedBatch] = []
        self.parts: list[slice] = []

    def scratch(self, width: int | None = None) -> Tensor:
        """Zeros on the disk for all tokens, `[tokens, width]`, by default as wide as hidden states."""
        shape = self._tokens, width or self._shape.hidden
        return scratch_tensor(self._directory, shape, self._inputs.dtype)

    def recording(self, collectors: Sequence[Collector]) -> AbstractContextManager[None]:
        """Context manager in which the experts record their inputs and routing, and return zeros, for one pass of all
        batches."""

        def note(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            start = self.parts[-1].stop if self.parts else 0
            if not self.parts:
                shape = self._tokens, self._shape.hidden
                self._inputs = scratch_tensor(self._directory, shape, hidden_states.dtype)
            self.parts.append(slice(start, start + len(hidden_states)))
            self._inputs[self.parts[-1]] = hidden_states.detach().cpu()
            self._routings.append(RoutedBatch(top_k_index.cpu(), top_k_weights.detach().cpu(), self._shape.experts))
            for collector in collectors:
                collector.observe_inputs(hidden_states, self._routings[-1])
            return torch.zeros_like(hidden_states)

        return replaced(self._native, note)

    @torch.no_grad()
    def observe(
        self,
        experts: range,
        collectors: Sequence[Collector],
        outputs: Tensor | None = None,
        summed: Tensor | None = None,
        tick: Tick = lambda: None,
    ) -> None:
        """Run some experts on all batches; add their outputs to `outputs` `[tokens, hidden]`, and their activations to
        `summed` `[tokens, intermediate]`."""
        with self._model.holding(self._index, self._native, experts) as held:
            for part, routing in zip(self.parts, self._routings, strict=True):
                result, sums = (None if whole is None else whole[part] for whole in (outputs, summed))
                start = part.start * self._shape.top_k
                observe(collectors, held, routing, self._length, self._inputs[part], result, sums, start)
                tick()

    def again(self, collector: Collector, experts: range) -> None:
        """Run some experts once more on all recorded batches, for one collector to observe."""
        self.observe(experts, [collector])

    @torch.no_grad()
    def run(self, collectors: Sequence[Collector], outputs: Tensor | None, tick: Tick, *, sums_only: bool) -> None:
        """Run all experts, set after set, into `outputs`; `collectors` see sums, and unless `sums_only` the rest."""
        wanted = [collector for collector in collectors if collector.wants_sums]
        summed = self.scratch(self._shape.intermediate) if wanted else None
        for experts in self._model.working_sets:
            self.observe(experts, () if sums_only else collectors, outputs, summed, tick)
        for part in self.parts:
            for collector in wanted:
                assert summed is not None
                collector.observe_sum(summed[part].to(self._model.device))

    def answering(self, part: slice, outputs: Tensor) -> AbstractContextManager[None]:
        """Let the experts give `outputs` `[tokens, hidden]` for one batch."""
        return replaced(self._native, lambda hidden_states, *_: outputs[part].to(hidden_states, copy=True))

    def tracked(self, leaf: Tensor) -> AbstractContextManager[None]:
        """Let the experts give `leaf`, at which a gradient is wanted, for one batch."""
        return replaced(self._native, lambda *_: leaf.clone())

    def answering_backwards(
        self, part: slice, outputs: Tensor, given: Tensor, weighing: Tensor
    ) -> AbstractContextManager[None]:
        """Let the experts give `outputs` for one batch, and on the way back the gradients of their inputs, `given`
        `[tokens, hidden]`, and of the routing weights, `weighing` `[tokens, top_k]`."""

        def answer(hidden_states: Tensor, _: Tensor, top_k_weights: Tensor) -> Tensor:
            stored = outputs[part].to(hidden_states, copy=True)
            return _Played.apply(
                hidden_states, top_k_weights, stored, given[part].to(hidden_states), weighing[part].to(top_k_weights)
            )

        return replaced(self._native, answer)

    def backpropagate(self, gradients: Tensor, collectors: Sequence[Collector], tick: Tick) -> tuple[Tensor, Tensor]:
        """Backpropagate `gradients` `[tokens, hidden]` at the summed outputs of the experts to their inputs, and to the
        routing weights `[tokens, top_k]`. The last experts come first, as in autograd."""
        for part in self.parts:
            for collector in collectors:
                collector.observe_gradients(gradients[part].to(self._model.device))
        given = self.scratch()
        weighing = torch.zeros(self._tokens * self._shape.top_k, 1)
        for experts in reversed(self._model.working_sets):
            self._backpropagate_set(experts, gradients, collectors, tick, given, weighing)
        return given, weighing.view(self._tokens, self._shape.top_k)

    def _backpropagate_set(
        self,
        experts: range,
        gradients: Tensor,
        collectors: Sequence[Collector],
        tick: Tick,
        given: Tensor,
        weighing: Tensor,
    ) -> None:
        """Backpropagate through some experts: add to `given` and fill in `weighing` `[tokens · top_k, 1]`. Nothing of
        these experts is held when it returns."""
        with self._model.holding(self._index, self._native, experts) as held:
            for part, routing in zip(self.parts, self._routings, strict=True):
                first = part.start * self._shape.top_k
                for expert in reversed(experts):
                    pairs, rows = routing.of(expert)
                    if not len(pairs):
                        continue
                    inputs = self._inputs[part][rows].to(held.device).requires_grad_(True)
                    weights = routing.weights[pairs].to(held.device).requires_grad_(True)
                    with torch.enable_grad():
                        work = held.run(expert, inputs)
                        for collector in collectors:
                            collector.observe(expert, rows // self._length, inputs, work)
                        output = (work.output * weights).to(gradients.dtype)
                    torch.autograd.backward(output, gradients[part][rows].to(held.device))
                    assert inputs.grad is not None
                    assert weights.grad is not None
                    given[part].index_add_(0, rows, inputs.grad.to(given))
                    weighing[first + pairs] = weights.grad.to(weighing)
                tick()


class _Played(torch.autograd.Function):
    """Gives what was computed elsewhere, forwards and backwards."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, weights: Tensor, outputs: Tensor, given: Tensor, weighing: Tensor
    ) -> Tensor:
        ctx.save_for_backward(given, weighing)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given, weighing = ctx.saved_tensors
        return given, weighing, None, None, None


def spread(tick: Tick, ticks: int, steps: int) -> Tick:
    """Return a function that, called `steps` times, calls `tick` `ticks` times in all, evenly."""

    def counting() -> Iterator[None]:
        for step in range(steps):
            for _ in range((step + 1) * ticks // steps - step * ticks // steps):
                tick()
            yield

    counted = counting()
    return lambda: next(counted)


def scratch_tensor(directory: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the disk of `directory`, in a file without a name that is gone with the last reference to them, mapped
    into memory: the system reads and writes what is used, and may drop it.

    Raises:
        ResourceError: there is no room. It is taken at once, so that nothing fails later.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    with storage_errors(directory / "scratch", nbytes):
        descriptor, name = tempfile.mkstemp(prefix="scratch-", dir=directory)
        try:
            os.posix_fallocate(descriptor, 0, max(nbytes, 1))
            mapped = torch.from_file(name, shared=True, size=math.prod(shape), dtype=dtype)
        finally:
            os.close(descriptor)
            Path(name).unlink()
    return mapped.view(shape)
