"""What there is to choose: hulls of forms, and among items of a few forms each against all choices there are."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from moetool.compress.budget.items import Forms, Group, Item, Key, Ladder, dropped, factors_of, offered
from moetool.compress.budget.spending import allocate
from moetool.errors import UsageError
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank
from moetool.representations.quantized import Quantized
from moetool.representations.quantized_low_rank import QuantizedLowRank
from moetool.representations.shared_factor import SharedV


@dataclass(frozen=True)
class Point:
    nbytes: int
    loss: float


def item_of(points: Sequence[Point]) -> Item:
    """The rank of each form is its place in the list."""
    forms = [LowRank(place) for place in range(len(points))]
    return offered(forms, [point.nbytes for point in points], [point.loss for point in points])


def choose(menus: Sequence[Sequence[Point]], budget: int) -> list[int]:
    items: dict[Key, Item] = {(0, "up", expert): item_of(points) for expert, points in enumerate(menus)}
    return ranks(allocate("water-filling", [Group(items)], budget))


def ranks(forms: Forms) -> list[int]:
    return [form.rank for form in forms.values() if isinstance(form, LowRank)]


def menus(seed: int, count: int = 4) -> list[list[Point]]:
    draw = random.Random(seed)
    return [
        [Point(0, draw.uniform(5, 10)), *(Point(draw.randint(1, 20), draw.uniform(0, 9)) for _ in range(3))]
        for _ in range(count)
    ]


def totals(chosen: list[list[Point]], picked: list[int]) -> tuple[int, float]:
    points = [menu[index] for menu, index in zip(chosen, picked, strict=True)]
    return sum(point.nbytes for point in points), sum(point.loss for point in points)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("budget", [0, 7, 15, 30, 100])
def test_within_the_budget_and_near_the_best(seed: int, budget: int) -> None:
    chosen = menus(seed)
    size, loss = totals(chosen, choose(chosen, budget))
    assert size <= budget
    every = [totals(chosen, list(picked)) for picked in itertools.product(range(4), repeat=4)]
    best = min(lost for taken, lost in every if taken <= budget)
    # No choice on the hull is beaten at its own size; what is left over is less than one step of one menu.
    largest = max(point.loss for menu in chosen for point in menu)
    assert best <= loss <= best + largest
    if budget == 100:
        assert loss == pytest.approx(sum(min(point.loss for point in menu) for menu in chosen))


@pytest.mark.parametrize("seed", range(20))
def test_every_choice_is_best_at_its_own_size(seed: int) -> None:
    """At the sizes where a step of the hull ends, nothing of that size or less loses less."""
    chosen = menus(seed)
    every = [totals(chosen, list(picked)) for picked in itertools.product(range(4), repeat=4)]
    items = [item_of(menu) for menu in chosen]
    steps = sorted(
        (step for item in items for step in zip(item.slopes, np.diff(item.nbytes), strict=True)), reverse=True
    )
    budget = 0
    for _, size in steps:
        budget += int(size)
        taken, loss = totals(chosen, choose(chosen, budget))
        assert taken == budget
        assert loss == pytest.approx(min(lost for used, lost in every if used <= budget))


def test_a_hull_leaves_out_what_never_pays() -> None:
    item = item_of([Point(0, 10.0), Point(10, 9.0), Point(12, 2.0), Point(20, 2.5), Point(40, 1.0)])
    assert item.forms == [LowRank(0), LowRank(2), LowRank(4)]
    assert item.nbytes.tolist() == [0, 12, 40]
    assert item.losses.tolist() == [10.0, 2.0, 1.0]
    assert item.slopes.tolist() == [8 / 12, 1 / 28]
    assert [item.at(price) for price in (1.0, 8 / 12, 0.5, 1 / 28, 0.0)] == [0, 0, 1, 1, 2]
    assert item.step_bytes == 12


def test_equal_forms() -> None:
    menu = [Point(0, 0.0), Point(0, 0.0), Point(4, 0.0)]
    assert choose([menu, menu], 100) == [0, 0]


def test_too_small_a_budget() -> None:
    with pytest.raises(UsageError, match="19 bytes for the experts are not enough: at their smallest they take 20"):
        choose([[Point(10, 1.0)]] * 2, 19)


def test_a_ladder_has_every_rank_below_break_even_and_dense() -> None:
    item = Ladder((12, 12), torch.bfloat16).item(torch.tensor([8.0, 4, 2, 1, 0.5], dtype=torch.float64), 16.0)
    assert item.forms == [*(LowRank(rank) for rank in range(6)), Dense()]
    assert item.nbytes.tolist() == [0, 48, 96, 144, 192, 240, 288]
    assert item.losses.tolist() == [16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.0]
    # After four steps, dense removes the rest at as much per byte as the fifth would remove.
    assert item.slopes.tolist() == [8 / 48, 4 / 48, 2 / 48, 1 / 48, 1 / 96]
    assert (item.steps, item.step_bytes) == (5, 48)


def test_a_flat_ladder_goes_straight_to_dense() -> None:
    item = Ladder((8, 8), torch.bfloat16).item(torch.ones(3, dtype=torch.float64), 8.0)
    assert item.slopes.tolist() == [8 / 128]
    assert [item.forms[item.at(price)] for price in (1.0, 0.01)] == [LowRank(0), Dense()]


def test_a_ladder_in_multiples_of_a_shared_factor() -> None:
    item = Ladder((12, 12), torch.bfloat16, 2, SharedV).item(
        torch.tensor([8.0, 4, 2, 1, 0.5], dtype=torch.float64), 16.0
    )
    assert item.forms == [LowRank(0), SharedV(2), SharedV(4), Dense()]
    assert item.losses.tolist() == [16.0, 4.0, 1.0, 0.0]


def test_a_ladder_of_codes_ends_with_the_delta_in_codes() -> None:
    ladder = Ladder((128, 128), torch.bfloat16, bits=8)
    item = ladder.item(torch.arange(63, 0, -1).double(), 3000.0)
    assert item.forms == [
        LowRank(0),
        *(QuantizedLowRank(rank, 8, 128) for rank in range(1, 64)),
        Quantized(8, 128),
    ]
    assert item.nbytes.tolist() == [form.nbytes((128, 128), torch.bfloat16) for form in item.forms]
    assert item.losses[-1] == 0


def test_matrices_of_a_ladder_share_what_is_the_same() -> None:
    ladder = Ladder((12, 12), torch.bfloat16)
    items = [ladder.item(torch.arange(5, 0, -1).double() * scale, 15.0 * scale) for scale in (1, 2)]
    assert items[0].nbytes is items[1].nbytes
    assert items[0].forms is items[1].forms


def test_a_given_rank_is_dense_at_break_even() -> None:
    assert [factors_of((12, 12), rank, SharedV) for rank in (0, 5, 6, 50)] == [LowRank(0), SharedV(5), Dense(), Dense()]


def test_a_dropped_delta_has_one_form() -> None:
    item = dropped(3.0)
    assert (item.forms, item.at(0.0), item.step_bytes) == ([LowRank(0)], 0, None)
    assert item.losses.tolist() == [3.0]


def test_a_group_is_left_as_it_was_where_its_base_does_not_pay() -> None:
    items: dict[Key, Item] = {(0, "up", e): item_of([Point(0, 4.0), Point(10, 0.0)]) for e in range(2)}
    group = Group(items, base_bytes=10, native_bytes=20)
    assert (group.least, group.most) == (10, 20)
    assert [group.at(price) for price in (1.0, 0.5, 0.1)] == [10, None, None]  # 8 lost for 10 bytes less pays from 0.8
    assert [Group(items, 10).at(price) for price in (1.0, 0.5, 0.1)] == [10, 10, 30]
