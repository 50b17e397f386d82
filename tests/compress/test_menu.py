"""One form per matrix within a budget: against all choices there are."""

import itertools
import random

import pytest

from moetool.compress.menu import Dish, Menu, choose
from moetool.errors import UsageError


def menus(seed: int, count: int = 4) -> list[Menu]:
    draw = random.Random(seed)
    return [
        Menu([Dish(0, draw.uniform(5, 10)), *(Dish(draw.randint(1, 20), draw.uniform(0, 9)) for _ in range(3))])
        for _ in range(count)
    ]


def totals(chosen: list[Menu], picked: list[int]) -> tuple[int, float]:
    dishes = [menu.dishes[index] for menu, index in zip(chosen, picked, strict=True)]
    return sum(dish.nbytes for dish in dishes), sum(dish.loss for dish in dishes)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("budget", [0, 7, 15, 30, 100])
def test_within_the_budget_and_near_the_best(seed: int, budget: int) -> None:
    chosen = menus(seed)
    size, loss = totals(chosen, choose(chosen, budget))
    assert size <= budget
    every = [totals(chosen, list(picked)) for picked in itertools.product(range(4), repeat=4)]
    best = min(lost for taken, lost in every if taken <= budget)
    # No choice on the hull is beaten at its own size; what is left over is less than one step of one menu.
    largest = max(dish.loss for menu in chosen for dish in menu.dishes)
    assert best <= loss <= best + largest
    if budget == 100:
        assert loss == pytest.approx(sum(min(dish.loss for dish in menu.dishes) for menu in chosen))


@pytest.mark.parametrize("seed", range(20))
def test_every_choice_is_best_at_its_own_size(seed: int) -> None:
    """At the sizes where a step of the hull ends, nothing of that size or less loses less."""
    chosen = menus(seed)
    every = [totals(chosen, list(picked)) for picked in itertools.product(range(4), repeat=4)]
    steps = sorted(
        (step for menu in chosen for i in range(len(menu.hull)) if (step := menu.step(i)) is not None), reverse=True
    )
    budget = 0
    for _, size in steps:
        budget += size
        taken, loss = totals(chosen, choose(chosen, budget))
        assert taken == budget
        assert loss == pytest.approx(min(lost for used, lost in every if used <= budget))


def test_a_hull_leaves_out_what_never_pays() -> None:
    menu = Menu([Dish(0, 10.0), Dish(10, 9.0), Dish(12, 2.0), Dish(20, 2.5), Dish(40, 1.0)])
    assert menu.hull == [0, 2, 4]
    assert menu.step(0) == (8 / 12, 12)
    assert menu.step(2) is None


def test_equal_dishes() -> None:
    menu = Menu([Dish(0, 0.0), Dish(0, 0.0), Dish(4, 0.0)])
    assert choose([menu, menu], 100) == [0, 0]


def test_too_small_a_budget() -> None:
    with pytest.raises(UsageError, match="the smallest forms take 20"):
        choose([Menu([Dish(10, 1.0)])] * 2, 19)
