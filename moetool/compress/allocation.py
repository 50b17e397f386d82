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
from itertools import accumulate, count

from torch import Tensor

from moetool.compress.choices import Allocation
from moetool.errors import UsageError
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
    def rests(self) -> list[float]:
        """Loss that is left after each number of steps in rank."""
        return [max(self.energy - removed, 0.0) for removed in accumulate(self.gains, initial=0.0)]

    def rest(self, rank: int | None) -> float:
        """Loss that is left at a rank."""
        return 0.0 if rank is None else self.rests[rank // self.multiple]

    @cached_property
    def _hull(self) -> tuple[int, float]:
        """The step from which going straight to dense removes more per byte than the next step, and that slope."""
        best = 0, 0.0
        for step, rest in enumerate(self.rests):
            slope = rest / (self.dense_bytes - step * self.step_bytes)
            best = step, slope
            if step == len(self.gains) or slope >= self.gains[step] / self.step_bytes:
                break
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
        return low * self.multiple, low * self.step_bytes, self.rests[low]

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
    ranks = [group.at(math.exp(high))[0] for group in groups]
    direct, stepwise = _Filling(groups, ranks, budget), _Filling(groups, ranks, budget)
    direct.fill()
    # A large purchase can leave too little for the many small ones that would have removed more.
    stepwise.fill(only_steps=True)
    stepwise.fill()
    return min(direct, stepwise, key=lambda filling: math.fsum(filling.losses)).ranks


class _Filling:
    """Spends what is left of a budget: steps in rank, matrices that become dense, groups that do without a base.

    Of the purchases that still fit always the one that removes most loss per byte, until none fits.
    """

    def __init__(self, groups: Sequence[Group], ranks: Sequence[Ranks | None], budget: int) -> None:
        self._groups, self.ranks = groups, [None if row is None else list(row) for row in ranks]
        self.losses, self._sizes = [], []
        for group, row in zip(groups, ranks, strict=True):
            own = list(zip(group.curves, row or [], strict=row is not None))
            size = group.base_bytes + sum(curve.bytes_at(rank) for curve, rank in own)
            self._sizes.append(group.native_bytes if row is None else size)
            self.losses.append(math.fsum(curve.rest(rank) for curve, rank in own))
        self._left = budget - sum(self._sizes)
        self._queue: list[tuple[float, int, int, int, int | None, int | None]] = []
        self._offers = count()

    def fill(self, *, only_steps: bool = False) -> None:
        """Spend until nothing fits any more, or no step in rank does."""
        while self._freed(only_steps):
            pass

    def _freed(self, only_steps: bool) -> bool:
        """Spend; `True` if a base that did not pay left more to spend."""
        for index, row in enumerate(self.ranks):
            for matrix in range(len(row or [])):
                self._offer(index, matrix, only_steps)
            if row is not None and not only_steps and not self._groups[index].is_trimmed:
                nbytes = self._groups[index].native_bytes - self._sizes[index]
                self._push(self.losses[index], nbytes, index, -1, None, None)
        freed = False
        while self._queue:
            _, _, index, matrix, before, after = heapq.heappop(self._queue)
            row, group = self.ranks[index], self._groups[index]
            if row is None:
                continue
            if matrix < 0:
                nbytes = group.native_bytes - self._sizes[index]
                if self._spend(nbytes, self.losses[index], index):
                    self.ranks[index], freed = None, freed or nbytes < 0
            elif row[matrix] == before:
                curve = group.curves[matrix]
                nbytes = curve.bytes_at(after) - curve.bytes_at(before)
                if self._spend(nbytes, curve.rest(before) - curve.rest(after), index):
                    row[matrix] = after
                    self._offer(index, matrix, only_steps)
        return freed

    def _spend(self, nbytes: int, gain: float, index: int) -> bool:
        if nbytes > self._left:
            return False
        self._left -= nbytes
        self._sizes[index] += nbytes
        self.losses[index] -= gain
        return True

    def _offer(self, index: int, matrix: int, only_steps: bool) -> None:
        """What can be had next for one matrix."""
        curve, row = self._groups[index].curves[matrix], self.ranks[index]
        rank = None if row is None else row[matrix]
        if rank is None or curve.is_trimmed:
            return
        choices: list[int | None] = [] if only_steps else [None]
        if rank // curve.multiple < len(curve.gains):
            choices.append(rank + curve.multiple)
        for after in choices:
            nbytes = curve.bytes_at(after) - curve.bytes_at(rank)
            self._push(curve.rest(rank) - curve.rest(after), nbytes, index, matrix, rank, after)

    def _push(self, gain: float, nbytes: int, index: int, matrix: int, before: int | None, after: int | None) -> None:
        worth = gain / nbytes if nbytes > 0 else math.inf
        if nbytes <= self._left:
            heapq.heappush(self._queue, (-worth, next(self._offers), index, matrix, before, after))


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
    left, grows = budget - size(rows), True
    while grows:  # a step for each in turn
        grows = False
        for group, row in zip(groups, rows, strict=True):
            for matrix, curve in enumerate(group.curves):
                rank = row[matrix]
                if rank is not None and rank // curve.multiple < len(curve.gains) and curve.step_bytes <= left:
                    row[matrix] = rank + curve.multiple
                    left -= curve.step_bytes
                    grows = True
    filling = _Filling(groups, rows, budget)
    filling.fill()
    return filling.ranks


def fixed_rank(curve: Curve, rank: int) -> int | None:
    """A given rank, or dense where that costs no more."""
    return rank if rank <= break_even_rank(curve.shape) else None


def allocate(method: Allocation, groups: Sequence[Group], budget: int) -> list[Ranks | None]:
    """Ranks by the named method."""
    return {"water-filling": water_filling, "adaptive": adaptive, "uniform": uniform}[method](groups, budget)
