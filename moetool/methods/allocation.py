"""Which rank for which matrix: spending a budget of bytes where it removes most loss.

For every matrix the loss that remains at rank k is known in advance: the energy beyond the k largest whitened singular
values, weighted by how sensitive the model is to errors in that matrix. Water-filling spends each byte where the loss
falls fastest, over all experts, roles and layers at once, by a single price λ per byte (METHODS: D²-MoE rank and ratio;
Appendix A.7 of the paper is a weak form of it). Two more choices have a price like any other: a matrix may be kept
dense, which costs no more than factors of break-even rank and loses nothing; and a group of matrices may do without a
base at all and stay as it was.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from moetool.errors import UsageError
from moetool.methods.choices import Allocation
from moetool.representations.low_rank import break_even_rank

Ranks = list[int | None]  # per matrix, None: kept dense


@dataclass(frozen=True, eq=False)
class Curve:
    """What one matrix `shape` loses at each rank.

    Attributes:
        spectrum: fp64, weighted squared whitened singular values, descending.
        energy: their sum over all, including those not listed.
        itemsize: bytes per stored number.
        multiple: ranks come in multiples of this.
        is_trimmed: the difference is to be dropped, whatever that costs.
    """

    shape: tuple[int, int]
    spectrum: Tensor
    energy: float
    itemsize: int
    multiple: int = 1
    is_trimmed: bool = False

    @property
    def step_bytes(self) -> int:
        """Bytes of one step in rank."""
        return sum(self.shape) * self.itemsize * self.multiple

    @property
    def dense_bytes(self) -> int:
        """Bytes of the matrix itself."""
        return self.shape[0] * self.shape[1] * self.itemsize

    @cached_property
    def gains(self) -> list[float]:
        """Loss removed by each step in rank, up to the last one that is cheaper than the dense matrix."""
        if self.is_trimmed:
            return []
        steps = min(break_even_rank(self.shape), len(self.spectrum)) // self.multiple
        return self.spectrum[: steps * self.multiple].reshape(-1, self.multiple).sum(1).tolist()

    @cached_property
    def _hull(self) -> tuple[int, float]:
        """The step from which going straight to dense removes more per byte than the next step, and that slope."""
        rest, best = self.energy, (0, 0.0)
        for step in range(len(self.gains) + 1):
            slope = max(rest, 0.0) / (self.dense_bytes - step * self.step_bytes)
            best = step, slope
            if step == len(self.gains) or slope >= self.gains[step] / self.step_bytes:
                break
            rest -= self.gains[step]
        return best

    def at(self, price: float) -> tuple[int | None, int, float]:
        """The best choice when a byte costs `price`: rank or `None` for dense, its bytes, and the loss that is left."""
        if self.is_trimmed:
            return 0, 0, self.energy
        last, slope = self._hull
        if slope > price:
            return None, self.dense_bytes, 0.0
        low, high = 0, last  # gains fall, so the steps worth taking are a prefix
        while low < high:
            middle = (low + high) // 2
            if self.gains[middle] > price * self.step_bytes:
                low = middle + 1
            else:
                high = middle
        return low * self.multiple, low * self.step_bytes, max(self.energy - math.fsum(self.gains[:low]), 0.0)

    def bytes_at(self, rank: int | None) -> int:
        """Stored bytes at a rank."""
        return self.dense_bytes if rank is None else rank * sum(self.shape) * self.itemsize


@dataclass(frozen=True, eq=False)
class Group:
    """Matrices that share the decision whether there is a base: gate and up of a layer, or its down."""

    curves: Sequence[Curve]
    base_bytes: int

    @property
    def native_bytes(self) -> int:
        """Bytes if nothing is done to the group."""
        return sum(curve.dense_bytes for curve in self.curves)

    @property
    def is_trimmed(self) -> bool:
        """Whether the group must have a base, because differences to it are to be dropped."""
        return any(curve.is_trimmed for curve in self.curves)

    @property
    def most(self) -> tuple[Ranks | None, int]:
        """The choice that loses least whatever it takes, and its bytes."""
        if not self.is_trimmed:
            return None, self.native_bytes
        kept = [curve for curve in self.curves if not curve.is_trimmed]
        return [0 if curve.is_trimmed else None for curve in self.curves], self.base_bytes + sum(
            curve.dense_bytes for curve in kept
        )

    def at(self, price: float) -> tuple[Ranks | None, int]:
        """The best choice at a price, `None` for leaving the group as it was, and its bytes."""
        choices = [curve.at(price) for curve in self.curves]
        size = self.base_bytes + sum(choice[1] for choice in choices)
        loss = math.fsum(choice[2] for choice in choices)
        if not self.is_trimmed and loss + price * size >= price * self.native_bytes:
            return None, self.native_bytes
        return [choice[0] for choice in choices], size


def byte_range(groups: Sequence[Group]) -> tuple[int, int]:
    """The least and the most bytes the groups can take: bases alone, and as they were."""
    return sum(group.base_bytes for group in groups), sum(group.most[1] for group in groups)


def water_filling(groups: Sequence[Group], budget: int) -> list[Ranks | None]:
    """Ranks that lose least within `budget` bytes for bases and differences.

    Raises:
        UsageError: not even the bases fit.
    """
    least, most = byte_range(groups)
    if budget < least:
        raise UsageError(f"{budget:,} bytes for the experts are not enough: their bases alone take {least:,}.")
    if budget >= most:
        return [group.most[0] for group in groups]
    low, high = -300.0, 300.0  # log of the price; sizes fall as it rises
    for _ in range(60):
        middle = (low + high) / 2
        if sum(group.at(math.exp(middle))[1] for group in groups) <= budget:
            high = middle
        else:
            low = middle
    chosen = [group.at(math.exp(high)) for group in groups]
    ranks = [ranks for ranks, _ in chosen]
    _spend_rest(groups, ranks, budget - sum(size for _, size in chosen))
    return ranks


def _spend_rest(groups: Sequence[Group], ranks: list[Ranks | None], left: int) -> None:
    """Spend what is left of the budget on single steps, the most useful that still fits first."""
    queue: list[tuple[float, int, int]] = []

    def offer(group: int, matrix: int) -> None:
        chosen, curve = ranks[group], groups[group].curves[matrix]
        rank = chosen[matrix] if chosen is not None else None
        if rank is not None and rank // curve.multiple < len(curve.gains):
            heapq.heappush(queue, (-curve.gains[rank // curve.multiple] / curve.step_bytes, group, matrix))

    for index, group in enumerate(groups):
        for matrix in range(len(group.curves)):
            offer(index, matrix)
    while queue:
        _, index, matrix = heapq.heappop(queue)
        curve, chosen = groups[index].curves[matrix], ranks[index]
        assert chosen is not None
        rank = chosen[matrix]
        assert rank is not None
        if curve.step_bytes <= left:
            left -= curve.step_bytes
            chosen[matrix] = rank + curve.multiple
            offer(index, matrix)


def uniform(groups: Sequence[Group], budget: int) -> list[Ranks | None]:
    """The same share of every matrix, as the paper's code does, filled up to `budget` bytes one rank at a time."""
    return _by_shares(groups, budget, [1.0] * len(groups))


def adaptive(groups: Sequence[Group], budget: int) -> list[Ranks | None]:
    """A share per layer that grows with what the layer loses without its differences, uniform within it (A.7).

    The paper measures this sensitivity and says which layers get more, not how much more; here a layer's share is
    proportional to the square root of its loss. Groups come in pairs, two of each layer.
    """
    losses = [
        math.fsum(curve.energy for group in groups[first : first + 2] for curve in group.curves)
        for first in range(0, len(groups), 2)
    ]
    weights = [math.sqrt(max(loss, 0.0)) for loss in losses]
    mean = math.fsum(weights) / len(weights)
    return _by_shares(groups, budget, [weights[i // 2] / mean if mean else 1.0 for i in range(len(groups))])


def _by_shares(groups: Sequence[Group], budget: int, weights: Sequence[float]) -> list[Ranks | None]:
    """Every matrix keeps a share of its parameters proportional to its group's weight; then single ranks on top."""
    least, most = byte_range(groups)
    if budget < least:
        raise UsageError(f"{budget:,} bytes for the experts are not enough: their bases alone take {least:,}.")
    if budget >= most:
        return [group.most[0] for group in groups]

    def chosen(share: float) -> list[list[int | None]]:
        return [
            [
                0
                if curve.is_trimmed
                else fixed_rank(curve, int(share * weight * curve.dense_bytes) // curve.step_bytes * curve.multiple)
                for curve in group.curves
            ]
            for group, weight in zip(groups, weights, strict=True)
        ]

    def size(rows: Sequence[Sequence[int | None]]) -> int:
        return least + sum(
            curve.bytes_at(rank)
            for group, row in zip(groups, rows, strict=True)
            for curve, rank in zip(group.curves, row, strict=True)
        )

    low, high = 0.0, 1.0 / max(min(weights), 1e-6)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if size(chosen(middle)) <= budget else (low, middle)
    rows = chosen(low)
    left = budget - size(rows)
    for group, row in zip(groups, rows, strict=True):
        for matrix, curve in enumerate(group.curves):
            rank = row[matrix]
            if rank is not None and rank // curve.multiple < len(curve.gains) and curve.step_bytes <= left:
                row[matrix] = rank + curve.multiple
                left -= curve.step_bytes
    return list(rows)


def fixed_rank(curve: Curve, rank: int) -> int | None:
    """A given rank, or dense where that costs no more."""
    return rank if rank <= break_even_rank(curve.shape) else None


def allocate(method: Allocation, groups: Sequence[Group], budget: int) -> list[Ranks | None]:
    """Ranks by the named method."""
    return {"water-filling": water_filling, "adaptive": adaptive, "uniform": uniform}[method](groups, budget)
