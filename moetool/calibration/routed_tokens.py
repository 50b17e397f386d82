"""A store on disk of the inputs that the experts of one layer are given, and of how they are routed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moetool.calibration.held_experts import RoutedBatch
from moetool.calibration.observation import Collector
from moetool.calibration.peers import Peers
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.files import storage_errors

_DTYPE = torch.bfloat16  # products are taken in no more


@dataclass(frozen=True, eq=False)
class RoutedText:
    """Tokens that go to some experts of a layer, window after window.

    Attributes:
        experts: the experts that `weights` has columns of.
        inputs: `[tokens, hidden]` bf16.
        weights: `[tokens, experts]` fp32 factors of the experts' outputs, 0 where a token does not go to an expert.
    """

    experts: range
    inputs: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Tensor | slice) -> "RoutedText":
        """Select some of the tokens, with their inputs and routing weights."""
        return RoutedText(self.experts, self.inputs[rows], self.weights[rows])

    def of(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of one expert: rows `[routed]`, inputs `[routed, hidden]` fp32 and weights `[routed, 1]`."""
        weights = self.weights[:, self.experts.index(expert)]
        rows = weights.nonzero()[:, 0]
        return rows, self.inputs[rows].float(), weights[rows, None]


class RoutedTokens(Collector):
    """A collector of the inputs of a layer's experts, and of the experts that each token goes to.

    Every process stores its own windows, and after the pass reads those of all.

    Attributes:
        windows: number of windows, of all processes.
        length: tokens in each window.
    """

    def __init__(self, sweep: Sweep, layer: int) -> None:
        """Collect on one `layer`, into files beside the hidden states of the pass."""
        self._peers, self.length, self.windows = sweep.peers, sweep.length, sweep.count
        self._directory, self._layer, self._hidden = sweep.directory, layer, sweep.model.hidden_size
        self._tokens = [len(sweep.own) * sweep.length]
        self._parts = [self._mapped(sweep.peers.rank, self._tokens[0], new=True)]
        self._routings: list[tuple[int, RoutedBatch]] = []  # with the number of the token that a batch begins with
        self._noted = 0

    def _path(self, rank: int) -> Path:
        return self._directory / f"given-{self._layer:05d}-{rank}.bin"

    def _mapped(self, rank: int, tokens: int, *, new: bool = False) -> Tensor:
        path, size = self._path(rank), tokens * self._hidden
        if new:
            with storage_errors(path, size * _DTYPE.itemsize), path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, size * _DTYPE.itemsize))  # no later write may fail
        if not size:
            return torch.empty(0, self._hidden, dtype=_DTYPE)
        return torch.from_file(str(path), shared=True, size=size, dtype=_DTYPE).view(tokens, self._hidden)

    def observe_inputs(self, inputs: Tensor, routing: RoutedBatch) -> None:
        self._parts[0][self._noted : self._noted + len(inputs)] = inputs.detach().to("cpu", _DTYPE)
        self._routings.append((self._noted, routing.on_cpu()))
        self._noted += routing.tokens

    def reduce(self, peers: Peers) -> None:
        tokens = [count for others in peers.gather(self._tokens) for count in others]
        starts = [sum(tokens[:rank]) for rank in range(peers.size)]
        noted = [(start + starts[peers.rank], routing.said()) for start, routing in self._routings]
        self._routings = [(start, RoutedBatch.heard(*said)) for others in peers.gather(noted) for start, said in others]
        if peers.size > 1:
            peers.barrier()
            self._parts = [self._mapped(rank, count) for rank, count in enumerate(tokens)]
        self._tokens = tokens

    def text(self, experts: range, windows: Tensor, most: int, device: torch.device) -> RoutedText:
        """The tokens of some windows that go to any of some experts; of more than `most`, so many at even steps.

        Args:
            experts: indices of the experts.
            windows: `[windows]` bool, which windows the tokens are of.
            most: the largest number of tokens.
            device: where the text shall be.
        """
        found = []
        for column, expert in enumerate(experts):
            for start, routing in self._routings:
                pairs, rows = routing.of(expert)
                inside = windows[(rows + start) // self.length]
                weights = routing.weights[pairs[inside], 0].float()
                found.append((rows[inside] + start, torch.full_like(pairs[inside], column), weights))
        each, columns, factors = map(torch.cat, zip(*found, strict=True))
        tokens, rows = each.unique(return_inverse=True)
        weights = torch.zeros(len(tokens), len(experts))
        weights[rows, columns] = factors
        if len(tokens) > most:
            few = torch.arange(most) * len(tokens) // most
            tokens, weights = tokens[few], weights[few]
        return RoutedText(experts, self._rows(tokens).to(device), weights.to(device))

    def _rows(self, tokens: Tensor) -> Tensor:
        ends = torch.tensor(self._tokens).cumsum(0)
        parts = [
            part[tokens[(tokens >= end - len(part)) & (tokens < end)] - (end - len(part))]
            for part, end in zip(self._parts, ends.tolist(), strict=True)
        ]
        return torch.cat(parts)

    @staticmethod
    def nbytes(windows: int, length: int, hidden: int) -> int:
        """Bytes on disk that the bf16 inputs of `windows` windows of `length` tokens take."""
        return windows * length * hidden * _DTYPE.itemsize

    @contextmanager
    def kept(self) -> Iterator["RoutedTokens"]:
        """Context manager that deletes this process's file of token inputs when it ends."""
        try:
            yield self
        finally:
            self._parts = []
            self._path(self._peers.rank).unlink(missing_ok=True)
