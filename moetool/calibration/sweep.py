"""Passes over the calibration set: forwards and exactly backwards, one decoder layer at a time.

The loss is the mean next-token loss of each window (labels are the inputs, shifted once, or drawn from the model's own
predictions), summed over windows, so the gradient at a window's tokens is that window's own. It is multiplied by
`Sweep.loss_scale`, which brings a mean's gradients back to the size of a single token's: without, those of long windows
fall below what fp16 can hold.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.calibration.activations import ActivationFile
from moetool.calibration.boundaries import batch_size
from moetool.calibration.labels import drawn_labels
from moetool.calibration.observation import SQUARES_ADD_UP, Collector, LargestNumbers, observed, too_large
from moetool.calibration.peers import Peers
from moetool.calibration.recorded import Recorded, Tick, spread
from moetool.errors import InvalidInputError

if TYPE_CHECKING:
    from moetool.calibration.streaming import StreamedModel


class Sweep:
    """The calibration windows on their way through a streamed model.

    Hidden states live in `directory`, one file per layer boundary: boundary i is the input of layer i, boundary
    `layer_count` the output of the last one.

    Attributes:
        own: the windows that this process runs, in whole batches, so that hidden states are the same whoever runs them.
        kinds: kinds of text, by name.
        of_kind: which of `kinds` each window is of, int64 `[windows]`.
    """

    def __init__(
        self,
        model: "StreamedModel",
        windows: Tensor,
        directory: Path,
        tick: Tick = lambda: None,
        label_seed: int | None = None,
        masked: Tensor | None = None,
        kept: torch.dtype | None = None,
        peers: Peers | None = None,
        kinds: Sequence[str] = ("text",),
        of_kind: Tensor | None = None,
    ) -> None:
        """`windows` are token ids `[windows, length]`; `tick` is called once per batch; with a `label_seed` labels are
        drawn from the model's predictions. An encoder reads `masked` windows, and is to find what they hide. Files are
        in the dtype `kept`, by default the model's. Of several `peers`, who all go through the same, each runs windows
        of its own. Windows are of the `kinds` of text that `of_kind` says, by default of one."""
        self.masked = masked
        self._kept = kept or model.dtype
        self.label_seed = label_seed
        self.model, self.windows, self.directory, self.tick = model, windows, directory, tick
        self.count, self.length = windows.shape
        self.kinds = tuple(kinds)
        self.of_kind = torch.zeros(self.count, dtype=torch.int64) if of_kind is None else of_kind
        self.digests: dict[Path, str] = {}  # of the files that it has written
        self.batch_size = batch_size(self.count, self.length)
        self.peers = peers or Peers()
        batches = self.peers.part(-(-self.count // self.batch_size))
        self.own = range(self.batch_size * batches.start, min(self.batch_size * batches.stop, self.count))

    def within(self, directory: Path) -> "Sweep":
        """Return a sweep of the same model and windows that keeps its hidden states in another directory."""
        other = copy(self)
        other.directory, other.digests = directory, {}
        return other

    @property
    def loss_scale(self) -> float:
        """The factor on losses before gradients are taken: the power of two nearest to a window's number of
        predictions, which rounds nothing."""
        return 2.0 ** round(math.log2(max(self.length - 1, 1)))

    def _batches(self) -> Iterator[tuple[int, int]]:
        for bounds in self._bounds:
            yield bounds
            self.tick()

    @property
    def batch_count(self) -> int:
        """Number of batches that this process runs through one layer."""
        return -(-len(self.own) // self.batch_size)

    def _file(self, name: str, boundary: int) -> ActivationFile:
        shape = (self.count, self.length, *self.model.state_shape)
        return ActivationFile(self.directory / f"{name}-{boundary:05d}.bin", shape, self._kept)

    def hidden(self, boundary: int) -> ActivationFile:
        """Hidden states of all windows at a boundary between two layers."""
        return self._file("hidden", boundary)

    def gradient(self, boundary: int) -> ActivationFile:
        """Gradients of the scaled loss with respect to the hidden states at a layer boundary."""
        return self._file("gradient", boundary)

    def _write(self, file: ActivationFile, batches: Iterator[Tensor]) -> None:
        if self.peers.size > 1:
            file.replace_together(batches, self.own.start, self.peers)
        else:
            self.digests[file.path] = file.replace(batches)

    def _read(self, file: ActivationFile, start: int, stop: int) -> Tensor:
        return file.read(start, stop).to(self.model.device, self.model.dtype)

    def embed(self) -> None:
        """Embed the windows of this process and write the result as inputs of layer 0."""
        inputs = (self._inputs[start:stop] for start, stop in self._batches())
        self._write(self.hidden(0), map(self.model.embed, inputs))

    def through_layers(self) -> Iterator[int]:
        """Take the windows through the whole model, one layer in memory at a time, and yield the number of each that
        they have passed. In the end the last boundary is on the disk."""
        self.embed()
        for index in range(self.model.layer_count):
            with self.model.layer(index) as layer:
                self.forward(index, layer)
            self.hidden(index).path.unlink()
            yield index

    @property
    def _inputs(self) -> Tensor:
        """Token ids `[windows, length]` that the model reads: an encoder's with the hidden ones masked."""
        return self.windows if self.masked is None else self.masked

    def _experts(self, index: int, layer: nn.Module) -> nn.Module | None:
        reader = self.model.experts
        if reader is None or not reader.has(index):
            return None
        return layer.get_submodule(reader.architecture.experts_module)

    def forward(self, index: int, layer: nn.Module, collectors: Sequence[Collector] = (), *, keep: bool = True) -> None:
        """Run one loaded layer on its boundary; write the next boundary if `keep`."""
        native, largest = self._experts(index, layer), LargestNumbers()
        seeing = (largest, *collectors) if collectors else ()
        if native is not None and len(self.model.working_sets) > 1:
            self._forward_in_sets(index, layer, native, seeing, keep=keep)
            return largest.check(index)
        with torch.no_grad(), _watched(native, self.length, seeing):
            outputs = (self._run(index, layer, start, stop) for start, stop in self._batches())
            if keep:
                self._write(self.hidden(index + 1), _finite(outputs, index))
            else:
                for _ in outputs:
                    pass
        largest.check(index)
        self._reduce(collectors)

    def _reduce(self, collectors: Sequence[Collector]) -> None:
        for collector in collectors:
            collector.reduce(self.peers)

    def _run(self, index: int, layer: nn.Module, start: int, stop: int) -> Tensor:
        """The outputs of one loaded layer for some windows."""
        hidden = self._read(self.hidden(index), start, stop)
        return self.model.run_layer(index, layer, hidden, self._inputs[start:stop])

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        """Index of the first window of each batch, and of the one after its last."""
        return [(start, min(start + self.batch_size, self.count)) for start in self.own[:: self.batch_size]]

    def _recorded(
        self, index: int, layer: nn.Module, native: nn.Module, collectors: Sequence[Collector], tick: Tick
    ) -> Recorded:
        """Record the inputs and weights of the experts of a layer that is run without holding them."""
        recorded = Recorded(self.model, index, native, self.directory, len(self.own) * self.length, self.length)
        with torch.no_grad(), recorded.recording(collectors):
            for start, stop in self._bounds:
                self._run(index, layer, start, stop)
                tick()
        return recorded

    def _forward_in_sets(
        self, index: int, layer: nn.Module, native: nn.Module, collectors: Sequence[Collector], *, keep: bool
    ) -> None:
        tick = spread(self.tick, self.batch_count, (1 + len(self.model.working_sets) + keep) * self.batch_count)
        recorded = self._recorded(index, layer, native, collectors, tick)
        outputs = recorded.scratch() if keep else None
        recorded.run(collectors, outputs, tick, sums_only=False)
        for collector in collectors:
            collector.again = recorded.again

        def played(outputs: Tensor) -> Iterator[Tensor]:
            for (start, stop), part in zip(self._bounds, recorded.parts, strict=True):
                with torch.no_grad(), recorded.answering(part, outputs):
                    yield self._run(index, layer, start, stop)
                tick()

        if outputs is not None:
            self._write(self.hidden(index + 1), _finite(played(outputs), index))

    def _labels(self, window: int, true: Tensor, chances: Tensor) -> Tensor:
        """The next tokens `[tokens]`, or for the Fisher information proper some that the model might have said."""
        if self.label_seed is None:
            return true
        generator = torch.Generator().manual_seed((self.label_seed + 1) * 1_000_003 + window)
        return drawn_labels(chances.detach(), generator)

    def _predicted(self, window: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithms of all tokens' chances `[tokens, vocabulary]` fp32, where those of a window are predicted, and
        which these are `[tokens]`."""
        tokens = self.windows[window : window + 1].to(self.model.device)
        logits = self.model.head(tokens, hidden)[0].float()
        if self.masked is None:
            return logits[:-1].log_softmax(-1), tokens[0, 1:]
        hidden_ones = tokens[0] != self.masked[window].to(tokens.device)
        return logits[hidden_ones].log_softmax(-1), tokens[0, hidden_ones]

    def head(self) -> float:
        """Losses from the last boundary, and there their gradients, scaled. Returns the loss per true token."""
        losses: list[float] = []
        last = self.model.layer_count

        def gradients() -> Iterator[Tensor]:
            source = self.hidden(last)
            for start, stop in self._batches():
                rows = []
                for window in range(start, stop):  # logits of one window at a time: vocabularies are large
                    hidden = self._read(source, window, window + 1).requires_grad_(True)
                    with torch.enable_grad():
                        chances, true = self._predicted(window, hidden)
                        loss = F.nll_loss(chances, self._labels(window, true, chances))
                    losses.append(F.nll_loss(chances.detach(), true).item())
                    (loss * self.loss_scale).backward()
                    assert hidden.grad is not None
                    rows.append(hidden.grad)
                yield torch.cat(rows)

        self._write(self.gradient(last), _of_use(gradients(), last - 1))
        return sum(loss for others in self.peers.gather(losses) for loss in others) / self.count

    @torch.no_grad()
    def losses(self) -> Tensor:
        """Mean loss of each window that this process runs, from the last boundary: `[windows]` fp64."""
        source, found = self.hidden(self.model.layer_count), []
        for start, stop in self._batches():
            found += [
                F.nll_loss(*self._predicted(one, self._read(source, one, one + 1))).double().cpu()
                for one in range(start, stop)
            ]
        return torch.stack(found)

    @torch.no_grad()
    def logits(self) -> Iterator[Tensor]:
        """Yield the logits `[length, vocabulary]` of each window that this process runs, from the last boundary."""
        source = self.hidden(self.model.layer_count)
        for start, stop in self._batches():
            for one in range(start, stop):
                yield self.model.head(self.windows[one : one + 1], self._read(source, one, one + 1))[0]

    def backward(self, index: int, layer: nn.Module, collectors: Sequence[Collector] = ()) -> None:
        """Recompute one loaded layer with gradients and write those at its input boundary."""
        native = self._experts(index, layer)
        if native is not None and len(self.model.working_sets) > 1:
            gradients = self._gradients_in_sets(index, layer, native, collectors)
            return self._write(self.gradient(index), _of_use(gradients, index))
        with _watched(native, self.length, collectors):
            batches = (self._gradient(index, layer, start, stop) for start, stop in self._batches())
            self._write(self.gradient(index), _of_use(batches, index))
        self._reduce(collectors)

    def _gradient(self, index: int, layer: nn.Module, start: int, stop: int) -> Tensor:
        """The gradients at one loaded layer's input for some windows."""
        hidden = self._read(self.hidden(index), start, stop).requires_grad_(True)
        with torch.enable_grad():
            output = self.model.run_layer(index, layer, hidden, self._inputs[start:stop])
        torch.autograd.backward(output, self._read(self.gradient(index + 1), start, stop))
        assert hidden.grad is not None
        return hidden.grad

    def _gradients_in_sets(
        self, index: int, layer: nn.Module, native: nn.Module, collectors: Sequence[Collector]
    ) -> Iterator[Tensor]:
        sets = len(self.model.working_sets)
        tick = spread(self.tick, self.batch_count, (3 + 2 * sets) * self.batch_count)
        recorded = self._recorded(index, layer, native, collectors, tick)
        outputs, gradients = recorded.scratch(), recorded.scratch()
        recorded.run(collectors, outputs, tick, sums_only=True)
        batches = list(zip(self._bounds, recorded.parts, strict=True))
        for (start, stop), part in batches:
            leaf = outputs[part].to(self.model.device, copy=True).requires_grad_(True)
            with torch.enable_grad(), recorded.tracked(leaf):
                output = self._run(index, layer, start, stop)
            [own] = torch.autograd.grad(output, leaf, self._read(self.gradient(index + 1), start, stop))
            gradients[part] = own.cpu()
            tick()
        given, weighing = recorded.backpropagate(gradients, collectors, tick)
        for (start, stop), part in batches:
            with recorded.answering_backwards(part, outputs, given, weighing):
                yield self._gradient(index, layer, start, stop)
            tick()


def _watched(experts: nn.Module | None, length: int, collectors: Sequence[Collector]) -> AbstractContextManager[None]:
    return nullcontext() if experts is None else observed(experts, length, collectors)


def _finite(batches: Iterator[Tensor], layer: int) -> Iterator[Tensor]:
    """Pass batches through; stop at the first that is not a number."""
    for batch in batches:
        if not bool(torch.isfinite(batch).all()):
            raise InvalidInputError(
                f"Layer {layer} gives NaN or infinite values on the calibration text. Its weights are damaged, or the "
                "compute dtype is too narrow (try --compute-dtype float32)."
            )
        yield batch


def _of_use(gradients: Iterator[Tensor], layer: int) -> Iterator[Tensor]:
    """Pass gradients through; stop at the first batch that has NaN, or numbers whose squares do not add up."""
    for batch in gradients:
        if not (largest := batch.abs().amax().item()) <= SQUARES_ADD_UP:
            told = (
                f"Gradients of the loss at layer {layer} {'are NaN' if math.isnan(largest) else f'reach {largest:.1e}'}"
            )
            if batch.dtype == torch.float16:  # other dtypes reach as far as fp32
                raise InvalidInputError(f"{told}: float16 is too narrow for them (try --compute-dtype float32).")
            raise too_large(told)
        yield batch
