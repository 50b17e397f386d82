"""Which of several ways a place takes: its matrices on one base, on another, on none."""

import math
from collections.abc import Sequence

from moetool.compress.budget.items import Group


def cheapest(places: Sequence[Sequence[Group]], budget: int) -> list[int]:
    """For every place the number of the group, of those it could be, with which least is lost within `budget` bytes.

    As in water-filling all are decided by one price per byte, the lowest at which everything fits: a place takes the
    group whose best forms have the least loss + price · bytes. If nothing fits each takes its smallest.
    """

    def taken(price: float) -> list[int]:
        costs = [[loss + price * nbytes for nbytes, loss in (group.spent(price) for group in own)] for own in places]
        return [own.index(min(own)) for own in costs]

    def size(price: float) -> int:
        return sum(own[index].spent(price)[0] for own, index in zip(places, taken(price), strict=True))

    low, high = -300.0, 300.0  # log of the price; sizes fall as it rises
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if size(math.exp(middle)) <= budget else (middle, high)
    return taken(math.exp(high))
