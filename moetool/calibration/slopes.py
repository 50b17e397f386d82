"""How steeply experts' activations rise with what gate and up give, on a sample of the tokens of each expert."""

from collections.abc import Callable

import torch
from torch import Tensor

from moetool.calibration.held_experts import ExpertRun
from moetool.calibration.peers import Peers

MOST_SLOPES = 512  # tokens that are kept of an expert's, and at least half as many of more


class SlopeSamples:
    """`∂ activation / ∂ (gate, up)` of each neuron, for tokens that lie evenly among those that an expert was given.

    An activation depends on its own neuron's gate and up alone, so the derivatives of their sum are all of them.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[Tensor]] = {}
        self._steps: dict[int, int] = {}
        self._seen: dict[int, int] = {}

    def hold(self, experts: range) -> None:
        """Forget all samples, and keep those of these experts from now on."""
        self._kept = {expert: [] for expert in experts}
        self._steps, self._seen = dict.fromkeys(experts, 1), dict.fromkeys(experts, 0)

    def observe(self, expert: int, work: ExpertRun) -> None:
        """Keep some of the tokens of one expert's work, if it is among those that are kept."""
        if expert not in self._kept:
            return
        step, count = self._steps[expert], len(work.gate_up)
        chosen = work.gate_up[-self._seen[expert] % step :: step]
        self._seen[expert] += count
        if len(chosen):
            kept = torch.cat([*self._kept[expert], work.slopes(chosen)])
            while len(kept) > MOST_SLOPES:
                kept, self._steps[expert] = kept[::2].contiguous(), 2 * self._steps[expert]
            self._kept[expert] = [kept]

    def reduce(self, owner: Callable[[int], int], peers: Peers) -> None:
        """Bring the samples of all processes to the `owner` of each expert."""
        found: dict[int, list[Tensor]] = {expert: [] for expert in self._kept}
        for others in peers.gather({expert: [rows.cpu() for rows in own] for expert, own in self._kept.items()}):
            for expert, rows in others.items():
                if owner(expert) == peers.rank:
                    found[expert] += rows
        self._kept = found

    def of(self, expert: int) -> Tensor | None:
        """`[tokens, 2 · intermediate]` fp32, without gates `[tokens, intermediate]`; `None` if no token was seen."""
        return torch.cat(self._kept[expert]).float() if self._kept[expert] else None
