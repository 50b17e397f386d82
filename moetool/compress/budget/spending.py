"""Spending a budget of bytes where it removes most loss: one knapsack for ranks, bits and kinds.

Water-filling spends each byte where the loss falls fastest, over all experts, roles and layers at once, by a single
price λ per byte (METHODS: D²-MoE rank and ratio; Appendix A.7 of the paper is a weak form of it). The price is the
lowest at which everything fits; what it leaves over is spent purchase by purchase. Whether a matrix is kept dense, and
whether a group does without a base, have their price like any rank or number of bits.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Generic, Literal

from moetool.checkpoint.sizes import format_bytes
from moetool.compress.budget.items import Forms, FormT, Group, Item, ItemKeyT, byte_range
from moetool.errors import UsageError

Allocation = Literal["water-filling", "adaptive", "uniform"]

_CORRECTIONS = 32  # times that a budget is corrected by what is left or missing; then by halves
_Row = dict[ItemKeyT, int]  # the number of the form that each item of a group has


def allocate(method: Allocation, groups: Sequence[Group[FormT, ItemKeyT]], budget: int) -> dict[ItemKeyT, FormT]:
    """Choose a form for every item within `budget` bytes by the named method; items of a group left native are missing.

    Raises:
        UsageError: not even the smallest forms fit.
    """
    least, most = byte_range(groups)
    if budget < least:
        raise UsageError(f"{budget:,} bytes for the experts are not enough: at their smallest they take {least:,}.")
    if budget >= most:
        rows = [None if group.native_bytes is not None else _row(group, lambda _, item: item.last) for group in groups]
        return _forms(groups, rows)
    if method == "water-filling":
        return _water_filling(groups, budget)
    return _adaptive(groups, budget) if method == "adaptive" else _uniform(groups, budget)


def fit(method: Allocation, groups: Sequence[Group], target: int, planned: Callable[[Forms], int]) -> Forms:
    """Choose forms whose weight files, headers included, come as close to `target` bytes from below as choices allow.

    What the items say of their bytes need not be the whole: headers and alignment depend a little on all forms. So the
    budget is corrected until `planned`, the exact bytes of all files, fits: between one that does and one that does
    not.

    Raises:
        UsageError: no budget makes the files as small as that.
    """
    least, high = byte_range(groups)
    low = least  # between a budget that fits and one that does not, as far as known
    step = min((step for group in groups for item in group.items.values() if (step := item.step_bytes)), default=1)
    smallest = allocate(method, groups, least)
    left = target - planned(smallest)
    best = (left, smallest) if left >= 0 else None
    budget = least + max(0, left)
    for attempt in count(1):
        budget = min(max(budget, low), high)
        forms = allocate(method, groups, budget)
        left = target - planned(forms)
        if left >= 0 and (best is None or left < best[0]):
            best = left, forms
        low, high = (budget, high) if left >= 0 else (low, budget)
        if 0 <= left < step or high - low < (2 if best is None else step):
            break
        budget += left if left >= 0 else min(left, -step)  # less than a step may change nothing
        if not low < budget < high or attempt >= _CORRECTIONS:
            budget = (low + high) // 2
    if best is None:
        raise UsageError(f"The experts cannot be made small enough for {format_bytes(target)} in all.")
    return best[1]


def cheapest(
    places: Sequence[Sequence[Group]], budget: int, unchanged: Sequence[tuple[Sequence[int], int]] = ()
) -> list[int | None]:
    """Choose one of several groups for every place, so that least is lost within `budget` bytes.

    As in water-filling all are decided by one price per byte, the lowest at which everything fits: a place takes the
    group whose best forms have the least loss + price · bytes. If nothing fits each takes its smallest.

    Args:
        places: for every place the groups that it can be: its matrices on one base, on another, on none.
        budget: bytes.
        unchanged: places, by their numbers, that can be left as they are, all of them together, and the bytes that
            they then take; they lose nothing.

    Returns:
        The number of the group of every place; `None` for one that is left as it is.
    """

    def taken(price: float) -> list[int | None]:
        costs = [[loss + price * nbytes for nbytes, loss in (group.spent(price) for group in own)] for own in places]
        found: list[int | None] = [own.index(min(own)) for own in costs]
        for members, nbytes in unchanged:
            if price * nbytes <= math.fsum(min(costs[place]) for place in members):
                for place in members:
                    found[place] = None
        return found

    def size(price: float) -> int:
        found = taken(price)
        changed = (own[index].spent(price)[0] for own, index in zip(places, found, strict=True) if index is not None)
        return sum(changed) + sum(nbytes for members, nbytes in unchanged if found[members[0]] is None)

    return taken(_lowest_price(size, budget))


def _lowest_price(size: Callable[[float], int], budget: int) -> float:
    """The lowest price per byte at which everything fits into the budget; the highest there is if nothing does."""
    low, high = -300.0, 300.0  # log of the price; sizes fall as it rises
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if size(math.exp(middle)) <= budget else (middle, high)
    return math.exp(high)


def _row(group: Group[FormT, ItemKeyT], choose: Callable[[ItemKeyT, Item[FormT]], int]) -> _Row[ItemKeyT]:
    return {key: choose(key, item) for key, item in group.items.items()}


def _forms(groups: Sequence[Group[FormT, ItemKeyT]], rows: Sequence[_Row[ItemKeyT] | None]) -> dict[ItemKeyT, FormT]:
    return {
        key: group.items[key].forms[index]
        for group, row in zip(groups, rows, strict=True)
        if row is not None
        for key, index in row.items()
    }


def _water_filling(groups: Sequence[Group[FormT, ItemKeyT]], budget: int) -> dict[ItemKeyT, FormT]:
    """Choose forms of least estimated loss within the budget, by water-filling."""

    def size(price: float) -> int:
        sizes = ((group, group.at(price)) for group in groups)
        return sum((group.native_bytes or 0) if taken is None else taken for group, taken in sizes)

    price = _lowest_price(size, budget)
    rows = [None if group.at(price) is None else _row(group, lambda _, item: item.at(price)) for group in groups]
    direct, stepwise = _Purse(groups, rows, budget), _Purse(groups, rows, budget)
    direct.spend()
    # A large purchase can leave too little for the many small ones that would have removed more.
    stepwise.spend(only_steps=True)
    stepwise.spend()
    return _forms(groups, min(direct, stepwise, key=lambda purse: math.fsum(purse.losses)).rows)


def _uniform(groups: Sequence[Group[FormT, ItemKeyT]], budget: int) -> dict[ItemKeyT, FormT]:
    """Keep the same share of every matrix, as the paper's code does, filled up one rank at a time."""
    return _by_shares(groups, budget, {layer: 1.0 for group in groups for layer, _, _ in group.items})


def _adaptive(groups: Sequence[Group[FormT, ItemKeyT]], budget: int) -> dict[ItemKeyT, FormT]:
    """Keep a share per layer that grows with what the layer loses without its deltas, uniform within it (A.7).

    The paper measures this sensitivity and says which layers get more, not how much more; here a layer's share is
    proportional to the square root of its loss.
    """
    losses: dict[int, list[float]] = {}
    for group in groups:
        for (layer, _, _), item in group.items.items():
            losses.setdefault(layer, []).append(float(item.losses[0]))
    weights = {layer: math.sqrt(max(math.fsum(own), 0.0)) for layer, own in losses.items()}
    mean = math.fsum(weights.values()) / len(weights)
    return _by_shares(groups, budget, {layer: own / mean if mean else 1.0 for layer, own in weights.items()})


def _by_shares(
    groups: Sequence[Group[FormT, ItemKeyT]], budget: int, weights: Mapping[int, float]
) -> dict[ItemKeyT, FormT]:
    """Keep a share of every matrix that is proportional to its layer's weight; then add single steps.

    The forms are those of ladders: all steps have the same bytes.
    """

    def chosen(share: float) -> list[_Row[ItemKeyT]]:
        def paid(key: ItemKeyT, item: Item[FormT]) -> int:
            return min(int(share * weights[key[0]] * int(item.nbytes[-1])) // (item.step_bytes or 1), item.last)

        return [_row(group, paid) for group in groups]

    def size(rows: Sequence[_Row[ItemKeyT]]) -> int:
        return sum(_size(group, row) for group, row in zip(groups, rows, strict=True))

    low, high = 0.0, 1.0 / max(min(weights.values()), 1e-6)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if size(chosen(middle)) <= budget else (low, middle)
    rows = chosen(low)
    left, grows = budget - size(rows), True
    while grows:  # a step for each in turn
        grows = False
        for group, row in zip(groups, rows, strict=True):
            for key, item in group.items.items():
                if row[key] < item.steps and (nbytes := item.cost(row[key], row[key] + 1)[0]) <= left:
                    row[key] += 1
                    left -= nbytes
                    grows = True
    purse = _Purse(groups, rows, budget)
    purse.spend()
    return _forms(groups, purse.rows)


def _size(group: Group[FormT, ItemKeyT], row: _Row[ItemKeyT]) -> int:
    return group.base_bytes + sum(int(group.items[key].nbytes[index]) for key, index in row.items())


class _Purse(Generic[FormT, ItemKeyT]):
    """Spends what is left of a budget on larger forms, and on groups that do without a base.

    Of the purchases that still fit always the one that removes most loss per byte, until none fits.
    """

    def __init__(
        self, groups: Sequence[Group[FormT, ItemKeyT]], rows: Sequence[_Row[ItemKeyT] | None], budget: int
    ) -> None:
        self._groups, self.rows = groups, [None if row is None else dict(row) for row in rows]
        self.losses, self._sizes = [], []
        for group, row in zip(groups, rows, strict=True):
            self._sizes.append((group.native_bytes or 0) if row is None else _size(group, row))
            self.losses.append(math.fsum(group.items[key].losses[index] for key, index in (row or {}).items()))
        self._left = budget - sum(self._sizes)
        # Worth, turn among equals, group, which of its items (`None`: all at once), from which form, to which.
        self._queue: list[tuple[float, int, int, ItemKeyT | None, int, int]] = []
        self._turns = count()

    def spend(self, *, only_steps: bool = False) -> None:
        """Spend until nothing fits any more, or no step does."""
        while self._freed(only_steps):
            pass

    def _freed(self, only_steps: bool) -> bool:
        """Spend; `True` if a base that did not pay left more to spend."""
        for index, (group, row) in enumerate(zip(self._groups, self.rows, strict=True)):
            for own in row or {}:
                self._offer(index, own, only_steps)
            if row is not None and group.native_bytes is not None and not only_steps:
                self._push(self.losses[index], group.native_bytes - self._sizes[index], index, None, 0, 0)
        freed = False
        while self._queue:
            _, _, index, key, before, after = heapq.heappop(self._queue)
            row, group = self.rows[index], self._groups[index]
            if row is None:
                continue
            if key is None:
                nbytes = (group.native_bytes or 0) - self._sizes[index]
                if self._pay(nbytes, self.losses[index], index):
                    self.rows[index], freed = None, freed or nbytes < 0
            elif row[key] == before and self._pay(*group.items[key].cost(before, after), index):
                row[key] = after
                self._offer(index, key, only_steps)
        return freed

    def _pay(self, nbytes: int, gain: float, index: int) -> bool:
        if nbytes > self._left:
            return False
        self._left -= nbytes
        self._sizes[index] += nbytes
        self.losses[index] -= gain
        return True

    def _offer(self, index: int, key: ItemKeyT, only_steps: bool) -> None:
        """Queue what can be bought next for one item: the next form, and the best one there is."""
        item, row = self._groups[index].items[key], self.rows[index]
        before = item.last if row is None else row[key]
        if before < item.last and not only_steps:
            self._push_item(index, key, before, item.last)
        if before < item.steps and (only_steps or before + 1 < item.last):
            self._push_item(index, key, before, before + 1)

    def _push_item(self, index: int, key: ItemKeyT, before: int, after: int) -> None:
        nbytes, gain = self._groups[index].items[key].cost(before, after)
        self._push(gain, nbytes, index, key, before, after)

    def _push(self, gain: float, nbytes: int, index: int, key: ItemKeyT | None, before: int, after: int) -> None:
        worth = gain / nbytes if nbytes > 0 else math.inf
        if nbytes <= self._left:
            heapq.heappush(self._queue, (-worth, next(self._turns), index, key, before, after))
