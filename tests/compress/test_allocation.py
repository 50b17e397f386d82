"""Which rank for which matrix: against all choices there are, on problems small enough to try them all."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from moetool.compress.allocation import Curve, Group, Ranks, allocate, byte_range, fixed_rank, uniform, water_filling
from moetool.compress.choices import Allocation
from moetool.errors import UsageError
from moetool.representations.low_rank import break_even_rank

SHAPE = (12, 12)  # 144 numbers dense, 24 per rank, so ranks up to 5


def random_curve(seed: int, shape: tuple[int, int] = SHAPE, tail: float = 1.0, multiple: int = 1) -> Curve:
    """A falling spectrum of which only the part below break-even is listed, as in a factor file."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(min(shape), generator=generator, dtype=torch.float64).sort(descending=True).values
    values = values ** (4 * tail) * 10 ** float(torch.rand(1, generator=generator) * 2 - 1)
    listed = values[: break_even_rank(shape)]
    return Curve(shape, listed, float(values.sum()), itemsize=2, multiple=multiple)


def loss(groups: Sequence[Group], ranks: Sequence[Ranks | None]) -> float:
    """What is lost, from the meaning of a curve alone."""
    total = 0.0
    for group, chosen in zip(groups, ranks, strict=True):
        for curve, rank in zip(group.curves, chosen or [], strict=chosen is not None):
            total += 0.0 if rank is None else curve.energy - math.fsum(curve.spectrum[:rank].tolist())
    return total


def size(groups: Sequence[Group], ranks: Sequence[Ranks | None]) -> int:
    total = 0
    for group, chosen in zip(groups, ranks, strict=True):
        if chosen is None:
            total += sum(2 * curve.shape[0] * curve.shape[1] for curve in group.curves)
            continue
        total += group.base_bytes
        for curve, rank in zip(group.curves, chosen, strict=True):
            rows, columns = curve.shape
            total += 2 * (rows * columns if rank is None else rank * (rows + columns))
    return total


def every_choice(groups: Sequence[Group]) -> list[tuple[int, float, list[Ranks | None]]]:
    """All sensible allocations: each matrix at each cheaper rank or dense, each group with a base or as it was."""
    per_group: list[list[Ranks | None]] = []
    for group in groups:
        ranks = [[None, *range(0, break_even_rank(curve.shape) + 1, curve.multiple)] for curve in group.curves]
        per_group.append([None, *map(list, itertools.product(*ranks))])
    found = [list(choice) for choice in itertools.product(*per_group)]
    return [(size(groups, choice), loss(groups, choice), choice) for choice in found]


@cache
def choices_of(group: Group) -> list[tuple[int, float, list[Ranks | None]]]:
    return every_choice([group])


def best(choices: Sequence[tuple[int, float, list[Ranks | None]]], budget: int) -> float:
    return min(lost for taken, lost, _ in choices if taken <= budget)


def rescaled(curve: Curve, scale: float) -> Curve:
    return Curve(curve.shape, curve.spectrum * scale, curve.energy * scale, curve.itemsize, curve.multiple)


PROBLEMS = {
    "one group": [Group([random_curve(1), random_curve(2), random_curve(3)], 288)],
    "two groups": [
        Group([random_curve(4), random_curve(5)], 288),
        Group([random_curve(6, (7, 10)), random_curve(7, (7, 10))], 140),
    ],
    "flat spectra": [Group([random_curve(seed, tail=0.1) for seed in (8, 9, 10)], 288)],
    "dear base": [Group([random_curve(11), random_curve(12)], 500), Group([random_curve(13), random_curve(14)], 288)],
    "other shapes": [Group([random_curve(15, (9, 12)), random_curve(16, (12, 9)), random_curve(23, (5, 20))], 200)],
    "multiples": [Group([random_curve(seed, multiple=2) for seed in (17, 18, 19)], 288)],
    "scales apart": [Group([rescaled(random_curve(20 + i), 10.0 ** (8 * i - 8)) for i in range(3)], 288)],
}
PRICES = torch.logspace(-18, 9, 300, dtype=torch.float64).tolist()
each_problem = pytest.mark.parametrize("groups", PROBLEMS.values(), ids=PROBLEMS.keys())


@each_problem
def test_every_decision_is_the_cheapest_at_its_price(groups: list[Group]) -> None:
    """Loss plus price times bytes, over everything there is to choose: for one matrix, and for a group."""
    for group in groups:
        separate = [Group([curve], 0) for curve in group.curves]
        for price in PRICES[::3]:
            for curve, alone in zip(group.curves, separate, strict=True):
                rank, taken, lost = curve.at(price)
                assert (taken, lost) == (size([alone], [[rank]]), pytest.approx(loss([alone], [[rank]]), abs=1e-12))
                cheapest = min(own + price * bytes_ for bytes_, own, _ in choices_of(alone))
                assert lost + price * taken == pytest.approx(cheapest, rel=1e-9)
            ranks, taken = group.at(price)
            cheapest = min(own + price * bytes_ for bytes_, own, _ in choices_of(group))
            assert loss([group], [ranks]) + price * taken == pytest.approx(cheapest, rel=1e-9)


@each_problem
def test_no_choice_of_its_size_loses_less(groups: list[Group]) -> None:
    """At every price: nothing that fits into the bytes that the price leads to is better (Everett's theorem)."""
    choices = every_choice(groups)
    sizes = set()
    for price in PRICES:
        chosen = [group.at(price) for group in groups]
        ranks, taken = [ranks for ranks, _ in chosen], sum(taken for _, taken in chosen)
        assert taken == size(groups, ranks)
        assert loss(groups, ranks) == pytest.approx(best(choices, taken), rel=1e-12, abs=1e-12)
        sizes.add(taken)
    assert len(sizes) >= 3


@each_problem
def test_water_filling_is_best_at_those_sizes(groups: list[Group]) -> None:
    choices = every_choice(groups)
    sizes = {sum(group.at(price)[1] for group in groups) for price in PRICES}
    for budget in sizes:
        ranks = water_filling(groups, budget)
        assert size(groups, ranks) <= budget
        assert loss(groups, ranks) == pytest.approx(best(choices, budget), rel=1e-12, abs=1e-12)


@each_problem
def test_any_budget(groups: list[Group]) -> None:
    """Never more than the budget, never worse with more of it, and never far from the best there is.

    Between two prices the best choice is a knapsack; what a single price cannot reach is at most one decision, whose
    bytes are those of a whole group.
    """
    choices = every_choice(groups)
    least, most = byte_range(groups)
    assert (least, most) == (sum(g.base_bytes for g in groups), size(groups, [None] * len(groups)))
    decision = max(group.native_bytes for group in groups)
    before = math.inf
    for budget in range(least, most + 10, 7):
        ranks = water_filling(groups, budget)
        lost = loss(groups, ranks)
        assert size(groups, ranks) <= budget
        assert lost <= before + 1e-12
        if budget - decision >= min(taken for taken, _, _ in choices):
            assert lost <= best(choices, budget - decision) + 1e-12
        before = lost
    assert before == 0


def test_equal_steps_are_filled_exactly() -> None:
    """Where all steps cost the same and dense pays for nobody, every budget is spent in the best way there is."""
    curves = [
        Curve((20, 20), torch.tensor([9.0, 4, 1, 0.5, 0.25], dtype=torch.float64) * scale, 14.75 * scale + 1e-9, 2)
        for scale in (1.0, 0.3, 2.5)
    ]
    groups = [Group(curves, 100)]
    step = 2 * 40
    gains = sorted((value for curve in curves for value in curve.spectrum.tolist()), reverse=True)
    for steps in range(len(gains) + 1):
        for spare in (0, step - 1):
            ranks = water_filling(groups, 100 + steps * step + spare)
            assert size(groups, ranks) == 100 + steps * step
            assert loss(groups, ranks) == pytest.approx(sum(c.energy for c in curves) - sum(gains[:steps]), abs=1e-12)


def test_ranks_follow_the_loss() -> None:
    important, trifle = random_curve(1, (20, 20)), random_curve(1, (20, 20))
    trifle = Curve(trifle.shape, trifle.spectrum * 1e-3, trifle.energy * 1e-3, 2)
    [ranks] = water_filling([Group([important, trifle], 100)], 100 + 2 * 40 * 6)
    assert ranks is not None
    assert ranks[0] is None or ranks[0] > (ranks[1] or 0)


def test_dense_where_factors_are_no_cheaper() -> None:
    """A flat spectrum needs all directions; the matrix itself costs less than those and loses nothing."""
    flat = Curve((8, 8), torch.ones(3, dtype=torch.float64), 8.0, 2)
    [ranks] = water_filling([Group([flat, flat, flat], 100)], 100 + 2 * 64)
    assert ranks is not None
    assert ranks.count(None) <= 1
    [ranks] = water_filling([Group([flat, Curve((8, 8), torch.ones(3).double() * 1e-3, 8e-3, 2)], 30)], 30 + 2 * 64)
    assert ranks == [None, 0]


def test_no_base_where_a_base_does_not_pay() -> None:
    """All differences dense, plus a base: the group is better left alone."""
    flat = Curve((8, 8), torch.ones(3, dtype=torch.float64), 8.0, 2)
    steep = Curve((8, 8), torch.tensor([8.0, 1e-9, 1e-9], dtype=torch.float64), 8 + 2e-9, 2)
    ranks = water_filling([Group([flat, flat], 128), Group([steep, steep], 128)], 2 * 128 + 128 + 2 * 32)
    assert ranks == [None, [1, 1]]


@pytest.mark.parametrize("method", ["water-filling", "adaptive", "uniform"])
def test_everything_fits(method: str) -> None:
    groups = PROBLEMS["two groups"]
    most = byte_range(groups)[1]
    assert allocate(method, groups, most) == [None, None]
    assert allocate(method, groups, most + 1000) == [None, None]


@pytest.mark.parametrize("method", ["water-filling", "adaptive", "uniform"])
def test_bases_alone_must_fit(method: str) -> None:
    groups = PROBLEMS["two groups"]
    assert allocate(method, groups, 428) == [[0, 0], [0, 0]]
    with pytest.raises(UsageError, match="427 bytes for the experts are not enough: their bases alone take 428"):
        allocate(method, groups, 427)


def purchases(groups: Sequence[Group], ranks: Sequence[Ranks | None]) -> list[int]:
    """Bytes of everything that could still be had: a step in rank, a dense matrix, a group without a base."""
    found = []
    for group, row in zip(groups, ranks, strict=True):
        if row is None:
            continue
        if not group.is_trimmed:
            found.append(group.native_bytes - size([group], [row]))
        for curve, rank in zip(group.curves, row, strict=True):
            if rank is not None and not curve.is_trimmed:
                found.append(curve.dense_bytes - curve.bytes_at(rank))
                if rank + curve.multiple <= break_even_rank(curve.shape):
                    found.append(curve.step_bytes)
    return found


FEW = {
    "one matrix": [Group([random_curve(24)], 100)],
    "a matrix for all experts": [Group([random_curve(25, (48, 12)), random_curve(26, (48, 12))], 288)],
    "equal groups": [Group([random_curve(27, tail=0.2)] * 2, 288)] * 2,
    "flat and steep": [Group([random_curve(28, tail=0.05)] * 3, 300), Group([random_curve(29, tail=3)] * 3, 300)],
    "small bases": [Group([random_curve(30, tail=0.1)] * 3, 10), Group([random_curve(31, (20, 30))], 30)],
}


@pytest.mark.parametrize("method", ["water-filling", "adaptive", "uniform"])
@pytest.mark.parametrize("groups", (PROBLEMS | FEW).values(), ids=(PROBLEMS | FEW).keys())
def test_nothing_more_would_fit(method: Allocation, groups: list[Group]) -> None:
    least, most = byte_range(groups)
    for budget in range(least, most, 7):
        ranks = allocate(method, groups, budget)
        left = budget - size(groups, ranks)
        assert left >= 0
        assert left < min(purchases(groups, ranks), default=1), (budget, ranks)


def test_uniform_is_the_same_share_of_every_matrix() -> None:
    small, large = random_curve(1, (20, 20)), random_curve(2, (40, 40))
    [ranks] = uniform([Group([small, large, small], 100)], 100 + 2 * (6 * 40 + 12 * 80 + 6 * 40))
    assert ranks == [6, 12, 6]


def test_uniform_does_not_look_at_the_loss() -> None:
    curves = [random_curve(seed, (20, 20)) for seed in (1, 2)]
    scaled = [Curve(curve.shape, curve.spectrum * 1e6, curve.energy * 1e6, 2) for curve in curves]
    [ranks] = uniform([Group([curves[0], scaled[1]], 100)], 100 + 2 * 40 * 7)
    assert ranks == [4, 3]


@pytest.mark.parametrize("method", ["water-filling", "adaptive", "uniform"])
def test_multiples(method: str) -> None:
    groups = PROBLEMS["multiples"]
    found = {rank for budget in range(288, 864, 37) for rank in allocate(method, groups, budget)[0] or []}
    assert found - {None} == {0, 2, 4}


def test_water_filling_beats_uniform() -> None:
    for groups in PROBLEMS.values():
        least, most = byte_range(groups)
        for budget in range(least, most, 23):
            assert loss(groups, water_filling(groups, budget)) <= loss(groups, uniform(groups, budget)) + 1e-12


def test_a_fixed_rank_is_dense_at_break_even() -> None:
    curve = random_curve(1)
    assert [fixed_rank(curve, rank) for rank in (0, 5, 6, 50)] == [0, 5, None, None]
    assert [curve.bytes_at(rank) for rank in (0, 5, None)] == [0, 240, 288]


def trimmed(curve: Curve) -> Curve:
    return dataclasses.replace(curve, is_trimmed=True)


@pytest.mark.parametrize("method", ["water-filling", "adaptive", "uniform"])
@pytest.mark.parametrize("budget", [700, 1500, 10**6])
def test_trimmed_differences_get_nothing(method: str, budget: int) -> None:
    """Whatever the budget, and even where the group would otherwise do without a base."""
    groups = [Group([trimmed(random_curve(1)), random_curve(2), random_curve(3)], 288), Group([random_curve(4)], 288)]
    ranks = allocate(method, groups, budget)
    assert ranks[0] is not None
    assert ranks[0][0] == 0
    assert size(groups, ranks) <= budget
    assert byte_range(groups) == (576, 288 + 2 * 288 + 288)
    if budget > 10**5:
        assert ranks == [[0, None, None], None]


def test_adaptive_gives_more_to_layers_that_lose_more() -> None:
    spectrum = torch.linspace(5, 1, 5, dtype=torch.float64)
    weak, strong = Curve(SHAPE, spectrum, 15.0, 2), Curve(SHAPE, 4 * spectrum, 60.0, 2)
    groups = [Group([weak] * 4, 288), Group([weak] * 4, 288), Group([strong] * 4, 288), Group([strong] * 4, 288)]
    ranks = allocate("adaptive", groups, 4 * 288 + 16 * 3 * 48)
    totals = [sum(rank or 0 for rank in row or []) for row in ranks]
    assert sum(totals) == 16 * 3
    assert totals[2] + totals[3] > totals[0] + totals[1]
    assert allocate("uniform", groups, 4 * 288 + 16 * 3 * 48) == [[3] * 4] * 4
