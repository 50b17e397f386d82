"""One of several forms for every matrix, so that all of them together lose least within a budget of bytes.

Each matrix comes with a menu of forms, every one with its bytes and the loss that was measured for it. At a price per
byte each matrix takes what is cheapest in sum; the price is the lowest at which everything fits. What is left of the
budget buys the steps that remove most loss per byte.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from moetool.errors import UsageError


@dataclass(frozen=True)
class Dish:
    """One form of one matrix: what it takes and what it loses."""

    nbytes: int
    loss: float


@dataclass(frozen=True, eq=False)
class Menu:
    """The forms one matrix can have."""

    dishes: Sequence[Dish]

    @cached_property
    def hull(self) -> list[int]:
        """Indices of the forms that are best at some price, from the smallest to the best."""
        order = sorted(range(len(self.dishes)), key=lambda i: (self.dishes[i].nbytes, self.dishes[i].loss))
        kept: list[int] = []
        for index in order:
            if kept and self.dishes[index].loss >= self.dishes[kept[-1]].loss:
                continue
            while len(kept) > 1 and self._slope(kept[-1], index) >= self._slope(kept[-2], kept[-1]):
                kept.pop()
            kept.append(index)
        return kept

    def _slope(self, smaller: int, larger: int) -> float:
        """Loss removed per byte on the way from one form to a larger one."""
        a, b = self.dishes[smaller], self.dishes[larger]
        return (a.loss - b.loss) / (b.nbytes - a.nbytes) if b.nbytes > a.nbytes else math.inf

    def step(self, position: int) -> tuple[float, int] | None:
        """Loss removed per byte, and bytes, of going one form up on the hull; `None` at its end."""
        if position + 1 >= len(self.hull):
            return None
        here, there = self.hull[position], self.hull[position + 1]
        return self._slope(here, there), self.dishes[there].nbytes - self.dishes[here].nbytes


def choose(menus: Sequence[Menu], budget: int) -> list[int]:
    """For every menu the index of its form. The steps of all hulls are taken in order of loss removed per byte.

    Raises:
        UsageError: not even the smallest forms fit.
    """
    positions = [0] * len(menus)
    left = budget - sum(menu.dishes[menu.hull[0]].nbytes for menu in menus)
    if left < 0:
        raise UsageError(f"{budget:,} bytes for the experts are not enough: the smallest forms take {budget - left:,}.")
    queue: list[tuple[float, int]] = []

    def offer(menu: int) -> None:
        if (step := menus[menu].step(positions[menu])) is not None:
            heapq.heappush(queue, (-step[0], menu))

    for index in range(len(menus)):
        offer(index)
    while queue:
        _, index = heapq.heappop(queue)
        step = menus[index].step(positions[index])
        assert step is not None
        if step[1] <= left:
            left -= step[1]
            positions[index] += 1
            offer(index)
    return [menu.hull[position] for menu, position in zip(menus, positions, strict=True)]
