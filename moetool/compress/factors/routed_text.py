"""What the experts of a layer are given, on some of the tokens of a text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.calibration.held_experts import RoutedBatch
from moetool.calibration.observation import Collector
from moetool.calibration.sweep import Sweep

MOST_KEPT = 1 << 16  # that are kept in memory


@dataclass(frozen=True, eq=False)
class RoutedText:
    """Tokens, one window after the other.

    Attributes:
        inputs: `[tokens, hidden]`.
        weights: `[tokens, experts]`, what each expert's output is multiplied by; 0 where a token does not go to it.
    """

    inputs: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Tensor | slice) -> "RoutedText":
        """Inputs and weights of some of the tokens."""
        return RoutedText(self.inputs[rows], self.weights[rows])

    def of(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of one expert: which tokens, their inputs `[routed, hidden]` fp32, and its weights there `[routed, 1]`."""
        rows = self.weights[:, expert].nonzero()[:, 0]
        return rows, self.inputs[rows].float(), self.weights[rows, expert, None]


class TextCollector(Collector):
    """Keeps what the experts of a layer are given on every n-th token of a pass, so many that memory has room for."""

    def __init__(self, sweep: Sweep, experts: int) -> None:
        """For a pass of `sweep` forwards."""
        self._experts, self._stride = experts, -(-sweep.count * sweep.length // MOST_KEPT)
        self._seen = sweep.own.start * sweep.length
        self._first = 0
        self._inputs: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._peers = sweep.peers

    def observe_inputs(self, inputs: Tensor) -> None:
        self._first = -self._seen % self._stride
        self._seen += len(inputs)
        # Copies: a view of some rows would keep all of them in memory.
        self._inputs.append(inputs.detach()[self._first :: self._stride].to(torch.bfloat16, copy=True))

    def observe_routing(self, routing: RoutedBatch) -> None:
        weights = torch.zeros(routing.tokens, self._experts, device=self._inputs[-1].device)
        for expert in range(self._experts):
            pairs, rows = routing.of(expert)
            weights[rows.to(weights.device), expert] = routing.weights[pairs, 0].detach().to(weights)
        self._weights.append(weights[self._first :: self._stride].clone())

    def text(self) -> RoutedText:
        """Routed text of all processes, on the device of this one."""
        own = torch.cat(self._inputs), torch.cat(self._weights)
        all_ = self._peers.gather([tensor.cpu() for tensor in own]) if self._peers.size > 1 else [list(own)]
        inputs, weights = (torch.cat(parts).to(own[0].device) for parts in zip(*all_, strict=True))
        return RoutedText(inputs, weights)
