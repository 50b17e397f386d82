"""The group that a place takes, against all choices there are."""

import itertools
import random

import pytest

from moetool.compress.budget.items import Group, offered
from moetool.compress.budget.spending import cheapest
from moetool.representations.low_rank import LowRank


def group(place: int, points: list[tuple[int, float]], base: int) -> Group:
    """Of one item with forms of so many bytes and losses."""
    sizes, losses = zip(*points, strict=True)
    return Group({(place, "up", 0): offered([LowRank(rank) for rank in range(len(points))], sizes, losses)}, base)


def drawn(seed: int) -> list[list[Group]]:
    draw = random.Random(seed)
    return [
        [
            group(place, [(10 * i, draw.uniform(0, 9) / (i + 1)) for i in range(4)], draw.choice((0, 5, 15)))
            for _ in range(3)
        ]
        for place in range(3)
    ]


def best(places: list[list[Group]], budget: int) -> float:
    """The least that can be lost."""
    found = [float("inf")]
    for groups in itertools.product(*places):
        items = [next(iter(group.items.values())) for group in groups]
        for forms in itertools.product(*(range(len(item.forms)) for item in items)):
            size = sum(int(item.nbytes[form]) for item, form in zip(items, forms, strict=True))
            if size + sum(group.base_bytes for group in groups) <= budget:
                found.append(sum(float(item.losses[form]) for item, form in zip(items, forms, strict=True)))
    return min(found)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_taken_can_be_had_and_loses_least_at_a_price(seed: int) -> None:
    places = drawn(seed)
    least = sum(min(group.least for group in own) for own in places)
    for budget in range(least, least + 100, 20):
        taken = cheapest(places, budget)
        groups = [own[index] for own, index in zip(places, taken, strict=True) if index is not None]
        assert sum(group.least for group in groups) <= budget
        # Choices by one price are best for the bytes that they take; what is left over buys nothing here.
        alone = [[group] for group in groups]
        assert best(alone, budget) <= best(places, max(least, budget - 25)) + 1e-9


def test_a_base_that_earns_its_bytes_and_one_that_does_not() -> None:
    own = [(10, 8.0), (20, 4.0), (40, 1.0)]
    on_good = [(0, 4.0), (10, 1.0), (20, 0.5)]
    on_bad = [(0, 9.0), (10, 7.9), (20, 3.9)]
    assert cheapest([[group(0, own, 0), group(0, on_good, 8)]], 30) == [1]
    assert cheapest([[group(0, own, 0), group(0, on_bad, 8)]], 30) == [0]


def test_places_that_are_left_as_they_are_together() -> None:
    """They lose nothing, and are left so where their bytes buy more than other forms would."""
    forms = [(10, 8.0), (20, 4.0), (40, 1.0)]
    places = [[group(place, forms, 0)] for place in range(3)]
    together = [([0, 1], 42)]  # little more than the second form of both
    assert cheapest(places, 60, together) == [None, None, 0]
    assert cheapest(places, 40, together) == [0, 0, 0]
    assert cheapest(places, 60, [([0, 1], 90)]) == [0, 0, 0]
