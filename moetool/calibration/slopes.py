"""How steeply experts' activations rise with what gate and up give, on a sample of the tokens of each expert."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from moetool.architectures import MoEShape
from moetool.calibration.held_experts import ExpertRun
from moetool.calibration.peers import Peers
from moetool.calibration.sweep import Sweep

MOST_SLOPES = 512  # tokens that are kept of an expert's
_GOLDEN = -7046029254386353131  # 2^64 over the golden ratio, as a signed number


class SlopeSamples:
    """`∂ activation / ∂ (gate, up)` of each neuron, for tokens that lie about evenly among those that an expert was
    given.

    An activation depends on its own neuron's gate and up alone, so the derivatives of their sum are all of them. Kept
    are the tokens with the lowest keys. These are multiples of the golden ratio without their whole part, by a token's
    place in the text, and so the same however many processes share the text (D. Knuth, The Art of Computer Programming,
    vol. 3, 6.4).
    """

    def __init__(self, before: int = 0) -> None:
        """`before` are the rows that experts are given in windows that other processes run before those of this one."""
        self._before = self._next = before
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys [tokens] int64, ascending, and slopes

    @classmethod
    def within(cls, sweep: Sweep, shape: MoEShape) -> Self:
        """Make samples of the windows that this process runs of a sweep."""
        return cls(sweep.own.start * sweep.length * shape.top_k)

    def hold(self, experts: range) -> None:
        """Forget all samples, and keep those of these experts from now on."""
        self._kept = {expert: _lowest([]) for expert in experts}

    def at(self, position: int) -> None:
        """Take the position of the next rows to be observed (`Collector.at`)."""
        self._next = self._before + position

    def observe(self, expert: int, work: ExpertRun) -> None:
        """Keep some of the tokens of one expert's work, if it is among those that are kept."""
        if expert not in self._kept:
            return
        own = self._kept[expert]
        keys = torch.arange(self._next, self._next + len(work.gate_up)) * _GOLDEN
        chosen = keys.argsort()[:MOST_SLOPES]
        if len(own[0]) == MOST_SLOPES:
            chosen = chosen[keys[chosen] < own[0][-1]]
        if len(chosen):
            given = work.gate_up[chosen.to(work.gate_up.device)]
            self._kept[expert] = _lowest([own, (keys[chosen], work.slopes(given))])

    def reduce(self, owner: Callable[[int], int], peers: Peers) -> None:
        """Bring the samples of all processes to the `owner` of each expert."""
        found: dict[int, list[tuple[Tensor, Tensor]]] = {expert: [] for expert in self._kept}
        for others in peers.gather({expert: (keys, own.cpu()) for expert, (keys, own) in self._kept.items()}):
            for expert, own in others.items():
                if owner(expert) == peers.rank:
                    found[expert].append(own)
        self._kept = {expert: _lowest(own) for expert, own in found.items()}

    def of(self, expert: int) -> Tensor | None:
        """`[tokens, 2 · intermediate]` fp32, without gates `[tokens, intermediate]`; `None` if no token was seen."""
        keys, slopes = self._kept[expert]
        return slopes.float() if len(keys) else None


def _lowest(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The rows with the lowest keys of all parts, by these; none of no parts."""
    parts = [own for own in parts if len(own[0])]
    if not parts:
        return torch.empty(0, dtype=torch.int64), torch.empty(0)
    keys, order = torch.cat([keys for keys, _ in parts]).sort()
    slopes = torch.cat([own for _, own in parts])
    return keys[:MOST_SLOPES].clone(), slopes[order[:MOST_SLOPES].to(slopes.device)]
