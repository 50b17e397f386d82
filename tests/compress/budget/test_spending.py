"""Which form for which matrix: against all choices there are, on problems small enough to try them all."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from moetool.compress.budget import spending
from moetool.compress.budget.items import Forms, Group, Item, Key, Ladder, byte_range, dropped, offered
from moetool.compress.budget.spending import Allocation
from moetool.errors import UsageError
from moetool.representations import Representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank, break_even_rank

SHAPE = (12, 12)  # 144 numbers dense, 24 per rank, so ranks up to 5
ITEMSIZE = 2
Ranks = list[int | None]  # per matrix, None: dense


@dataclass(frozen=True, eq=False)
class Matrix:
    """What is known of one matrix; from it the item, and beside it what choices mean."""

    shape: tuple[int, int]
    spectrum: Tensor
    energy: float
    multiple: int = 1
    is_dropped: bool = False

    @property
    def ladder(self) -> Ladder:
        return Ladder(self.shape, torch.bfloat16, self.multiple)

    @property
    def item(self) -> Item:
        return dropped(self.energy) if self.is_dropped else self.ladder.item(self.spectrum, self.energy)

    @property
    def dense_bytes(self) -> int:
        return ITEMSIZE * self.shape[0] * self.shape[1]

    @property
    def step_bytes(self) -> int:
        return ITEMSIZE * sum(self.shape) * self.multiple

    def bytes_at(self, rank: int | None) -> int:
        return self.dense_bytes if rank is None else ITEMSIZE * sum(self.shape) * rank

    def at(self, price: float) -> tuple[int | None, int, float]:
        """Rank, bytes and loss of the best choice, as the item has them."""
        item = self.item
        chosen = item.at(price)
        return rank_of(item.forms[chosen]), int(item.nbytes[chosen]), float(item.losses[chosen])


@dataclass(frozen=True, eq=False)
class Shared:
    """Matrices on one base."""

    matrices: Sequence[Matrix]
    base_bytes: int

    @property
    def native_bytes(self) -> int:
        return sum(matrix.dense_bytes for matrix in self.matrices)

    @property
    def is_dropped(self) -> bool:
        return any(matrix.is_dropped for matrix in self.matrices)

    def group(self, index: int = 0) -> Group:
        """Two in a layer, as gate with up, and down."""
        items = {key(index, expert): matrix.item for expert, matrix in enumerate(self.matrices)}
        return Group(items, self.base_bytes, None if self.is_dropped else self.native_bytes)

    def at(self, price: float) -> tuple[Ranks | None, int]:
        """The best choice and its bytes."""
        taken = self.group().at(price)
        if taken is None:
            return None, self.native_bytes
        return [matrix.at(price)[0] for matrix in self.matrices], taken


def key(group: int, expert: int) -> Key:
    return group // 2, "down" if group % 2 else "up", expert


def groups_of(shared: Sequence[Shared]) -> list[Group]:
    return [own.group(index) for index, own in enumerate(shared)]


def rank_of(form: Representation) -> int | None:
    return form.rank if isinstance(form, LowRank) else None


def allocate(method: Allocation, shared: Sequence[Shared], budget: int) -> list[Ranks | None]:
    forms = spending.allocate(method, groups_of(shared), budget)
    rows: list[Ranks | None] = []
    for index, own in enumerate(shared):
        keys = [key(index, expert) for expert in range(len(own.matrices))]
        assert len({key in forms for key in keys}) == 1
        rows.append([rank_of(forms[key]) for key in keys] if keys[0] in forms else None)
    return rows


def water_filling(shared: Sequence[Shared], budget: int) -> list[Ranks | None]:
    return allocate("water-filling", shared, budget)


def uniform(shared: Sequence[Shared], budget: int) -> list[Ranks | None]:
    return allocate("uniform", shared, budget)


def random_matrix(seed: int, shape: tuple[int, int] = SHAPE, tail: float = 1.0, multiple: int = 1) -> Matrix:
    """A falling spectrum of which only the part below break-even is listed, as in a factor file."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(min(shape), generator=generator, dtype=torch.float64).sort(descending=True).values
    values = values ** (4 * tail) * 10 ** float(torch.rand(1, generator=generator) * 2 - 1)
    listed = values[: break_even_rank(shape)]
    return Matrix(shape, listed, float(values.sum()), multiple)


def loss(groups: Sequence[Shared], ranks: Sequence[Ranks | None]) -> float:
    """What is lost, from the meaning of a matrix alone."""
    total = 0.0
    for group, chosen in zip(groups, ranks, strict=True):
        for matrix, rank in zip(group.matrices, chosen or [], strict=chosen is not None):
            total += 0.0 if rank is None else matrix.energy - math.fsum(matrix.spectrum[:rank].tolist())
    return total


def size(groups: Sequence[Shared], ranks: Sequence[Ranks | None]) -> int:
    total = 0
    for group, chosen in zip(groups, ranks, strict=True):
        if chosen is None:
            total += sum(2 * matrix.shape[0] * matrix.shape[1] for matrix in group.matrices)
            continue
        total += group.base_bytes
        for matrix, rank in zip(group.matrices, chosen, strict=True):
            rows, columns = matrix.shape
            total += 2 * (rows * columns if rank is None else rank * (rows + columns))
    return total


def every_choice(groups: Sequence[Shared]) -> list[tuple[int, float, list[Ranks | None]]]:
    """All sensible allocations: each matrix at each cheaper rank or dense, each group with a base or as it was."""
    per_group: list[list[Ranks | None]] = []
    for group in groups:
        ranks = [[None, *range(0, break_even_rank(matrix.shape) + 1, matrix.multiple)] for matrix in group.matrices]
        per_group.append([None, *map(list, itertools.product(*ranks))])
    found = [list(choice) for choice in itertools.product(*per_group)]
    return [(size(groups, choice), loss(groups, choice), choice) for choice in found]


@cache
def choices_of(group: Shared) -> list[tuple[int, float, list[Ranks | None]]]:
    return every_choice([group])


def best(choices: Sequence[tuple[int, float, list[Ranks | None]]], budget: int) -> float:
    return min(lost for taken, lost, _ in choices if taken <= budget)


def rescaled(matrix: Matrix, scale: float) -> Matrix:
    return Matrix(matrix.shape, matrix.spectrum * scale, matrix.energy * scale, matrix.multiple)


PROBLEMS = {
    "one group": [Shared([random_matrix(1), random_matrix(2), random_matrix(3)], 288)],
    "two groups": [
        Shared([random_matrix(4), random_matrix(5)], 288),
        Shared([random_matrix(6, (7, 10)), random_matrix(7, (7, 10))], 140),
    ],
    "flat spectra": [Shared([random_matrix(seed, tail=0.1) for seed in (8, 9, 10)], 288)],
    "dear base": [
        Shared([random_matrix(11), random_matrix(12)], 500),
        Shared([random_matrix(13), random_matrix(14)], 288),
    ],
    "other shapes": [Shared([random_matrix(15, (9, 12)), random_matrix(16, (12, 9)), random_matrix(23, (5, 20))], 200)],
    "multiples": [Shared([random_matrix(seed, multiple=2) for seed in (17, 18, 19)], 288)],
    "scales apart": [Shared([rescaled(random_matrix(20 + i), 10.0 ** (8 * i - 8)) for i in range(3)], 288)],
}
PRICES = torch.logspace(-18, 9, 300, dtype=torch.float64).tolist()
each_problem = pytest.mark.parametrize("groups", PROBLEMS.values(), ids=PROBLEMS.keys())


@each_problem
def test_every_decision_is_the_cheapest_at_its_price(groups: list[Shared]) -> None:
    """Loss plus price times bytes, over everything there is to choose: for one matrix, and for a group."""
    for group in groups:
        separate = [Shared([matrix], 0) for matrix in group.matrices]
        for price in PRICES[::3]:
            for matrix, alone in zip(group.matrices, separate, strict=True):
                rank, taken, lost = matrix.at(price)
                assert (taken, lost) == (size([alone], [[rank]]), pytest.approx(loss([alone], [[rank]]), abs=1e-12))
                cheapest = min(own + price * bytes_ for bytes_, own, _ in choices_of(alone))
                assert lost + price * taken == pytest.approx(cheapest, rel=1e-9)
            ranks, taken = group.at(price)
            cheapest = min(own + price * bytes_ for bytes_, own, _ in choices_of(group))
            assert loss([group], [ranks]) + price * taken == pytest.approx(cheapest, rel=1e-9)


@each_problem
def test_no_choice_of_its_size_loses_less(groups: list[Shared]) -> None:
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
def test_water_filling_is_best_at_those_sizes(groups: list[Shared]) -> None:
    choices = every_choice(groups)
    sizes = {sum(group.at(price)[1] for group in groups) for price in PRICES}
    for budget in sizes:
        ranks = water_filling(groups, budget)
        assert size(groups, ranks) <= budget
        assert loss(groups, ranks) == pytest.approx(best(choices, budget), rel=1e-12, abs=1e-12)


@each_problem
def test_any_budget(groups: list[Shared]) -> None:
    """Never more than the budget, never worse with more of it, and never far from the best there is.

    Between two prices the best choice is a knapsack; what a single price cannot reach is at most one decision, whose
    bytes are those of a whole group.
    """
    choices = every_choice(groups)
    least, most = byte_range(groups_of(groups))
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
    matrices = [
        Matrix(
            (20, 20),
            torch.tensor([9.0, 4, 1, 0.5, 0.25, 0, 0, 0, 0], dtype=torch.float64) * scale,
            14.75 * scale + 1e-9,
        )
        for scale in (1.0, 0.3, 2.5)
    ]
    groups = [Shared(matrices, 100)]
    step = 2 * 40
    gains = sorted((value for matrix in matrices for value in matrix.spectrum.tolist() if value), reverse=True)
    for steps in range(len(gains) + 1):
        for spare in (0, step - 1):
            ranks = water_filling(groups, 100 + steps * step + spare)
            assert size(groups, ranks) == 100 + steps * step
            assert loss(groups, ranks) == pytest.approx(sum(c.energy for c in matrices) - sum(gains[:steps]), abs=1e-12)


def test_ranks_follow_the_loss() -> None:
    important, trifle = random_matrix(1, (20, 20)), random_matrix(1, (20, 20))
    trifle = Matrix(trifle.shape, trifle.spectrum * 1e-3, trifle.energy * 1e-3)
    [ranks] = water_filling([Shared([important, trifle], 100)], 100 + 2 * 40 * 6)
    assert ranks is not None
    assert ranks[0] is None or ranks[0] > (ranks[1] or 0)


def test_dense_where_factors_are_no_cheaper() -> None:
    """A flat spectrum needs all directions; the matrix itself costs less than those and loses nothing."""
    flat = Matrix((8, 8), torch.ones(3, dtype=torch.float64), 8.0)
    [ranks] = water_filling([Shared([flat, flat, flat], 100)], 100 + 2 * 64)
    assert ranks is not None
    assert ranks.count(None) <= 1
    [ranks] = water_filling([Shared([flat, Matrix((8, 8), torch.ones(3).double() * 1e-3, 8e-3)], 30)], 30 + 2 * 64)
    assert ranks == [None, 0]


def test_no_base_where_a_base_does_not_pay() -> None:
    """All differences dense, plus a base: the group is better left alone."""
    flat = Matrix((8, 8), torch.ones(3, dtype=torch.float64), 8.0)
    steep = Matrix((8, 8), torch.tensor([8.0, 1e-9, 1e-9], dtype=torch.float64), 8 + 2e-9)
    ranks = water_filling([Shared([flat, flat], 128), Shared([steep, steep], 128)], 2 * 128 + 128 + 2 * 32)
    assert ranks == [None, [1, 1]]


@pytest.mark.parametrize("method", ["water-filling", "adaptive", "uniform"])
def test_everything_fits(method: str) -> None:
    groups = PROBLEMS["two groups"]
    most = byte_range(groups_of(groups))[1]
    assert allocate(method, groups, most) == [None, None]
    assert allocate(method, groups, most + 1000) == [None, None]


@pytest.mark.parametrize("method", ["water-filling", "adaptive", "uniform"])
def test_bases_alone_must_fit(method: str) -> None:
    groups = PROBLEMS["two groups"]
    assert allocate(method, groups, 428) == [[0, 0], [0, 0]]
    with pytest.raises(UsageError, match="427 bytes for the experts are not enough: at their smallest they take 428"):
        allocate(method, groups, 427)


def purchases(groups: Sequence[Shared], ranks: Sequence[Ranks | None]) -> list[int]:
    """Bytes of everything that could still be had: a step in rank, a dense matrix, a group without a base."""
    found = []
    for group, row in zip(groups, ranks, strict=True):
        if row is None:
            continue
        if not group.is_dropped:
            found.append(group.native_bytes - size([group], [row]))
        for matrix, rank in zip(group.matrices, row, strict=True):
            if rank is not None and not matrix.is_dropped:
                found.append(matrix.dense_bytes - matrix.bytes_at(rank))
                if rank + matrix.multiple <= break_even_rank(matrix.shape):
                    found.append(matrix.step_bytes)
    return found


FEW = {
    "one matrix": [Shared([random_matrix(24)], 100)],
    "a matrix for all experts": [Shared([random_matrix(25, (48, 12)), random_matrix(26, (48, 12))], 288)],
    "equal groups": [Shared([random_matrix(27, tail=0.2)] * 2, 288)] * 2,
    "flat and steep": [Shared([random_matrix(28, tail=0.05)] * 3, 300), Shared([random_matrix(29, tail=3)] * 3, 300)],
    "small bases": [Shared([random_matrix(30, tail=0.1)] * 3, 10), Shared([random_matrix(31, (20, 30))], 30)],
}


@pytest.mark.parametrize("method", ["water-filling", "adaptive", "uniform"])
@pytest.mark.parametrize("groups", (PROBLEMS | FEW).values(), ids=(PROBLEMS | FEW).keys())
def test_nothing_more_would_fit(method: Allocation, groups: list[Shared]) -> None:
    least, most = byte_range(groups_of(groups))
    for budget in range(least, most, 7):
        ranks = allocate(method, groups, budget)
        left = budget - size(groups, ranks)
        assert left >= 0
        assert left < min(purchases(groups, ranks), default=1), (budget, ranks)


def test_uniform_is_the_same_share_of_every_matrix() -> None:
    small, large = random_matrix(1, (20, 20)), random_matrix(2, (40, 40))
    [ranks] = uniform([Shared([small, large, small], 100)], 100 + 2 * (6 * 40 + 12 * 80 + 6 * 40))
    assert ranks == [6, 12, 6]


def test_uniform_does_not_look_at_the_loss() -> None:
    matrices = [random_matrix(seed, (20, 20)) for seed in (1, 2)]
    scaled = [Matrix(matrix.shape, matrix.spectrum * 1e6, matrix.energy * 1e6) for matrix in matrices]
    [ranks] = uniform([Shared([matrices[0], scaled[1]], 100)], 100 + 2 * 40 * 7)
    assert ranks == [4, 3]


@pytest.mark.parametrize("method", ["water-filling", "adaptive", "uniform"])
def test_multiples(method: str) -> None:
    groups = PROBLEMS["multiples"]
    found = {rank for budget in range(288, 864, 37) for rank in allocate(method, groups, budget)[0] or []}
    assert found - {None} == {0, 2, 4}


def test_water_filling_beats_uniform() -> None:
    for groups in PROBLEMS.values():
        least, most = byte_range(groups_of(groups))
        for budget in range(least, most, 23):
            assert loss(groups, water_filling(groups, budget)) <= loss(groups, uniform(groups, budget)) + 1e-12


def without_delta(matrix: Matrix) -> Matrix:
    return dataclasses.replace(matrix, is_dropped=True)


@pytest.mark.parametrize("method", ["water-filling", "adaptive", "uniform"])
@pytest.mark.parametrize("budget", [700, 1500, 10**6])
def test_dropped_deltas_get_nothing(method: str, budget: int) -> None:
    """Whatever the budget, and even where the group would otherwise do without a base."""
    groups = [
        Shared([without_delta(random_matrix(1)), random_matrix(2), random_matrix(3)], 288),
        Shared([random_matrix(4)], 288),
    ]
    ranks = allocate(method, groups, budget)
    assert ranks[0] is not None
    assert ranks[0][0] == 0
    assert size(groups, ranks) <= budget
    assert byte_range(groups_of(groups)) == (576, 288 + 2 * 288 + 288)
    if budget > 10**5:
        assert ranks == [[0, None, None], None]


def test_adaptive_gives_more_to_layers_that_lose_more() -> None:
    spectrum = torch.linspace(5, 1, 5, dtype=torch.float64)
    weak, strong = Matrix(SHAPE, spectrum, 15.0), Matrix(SHAPE, 4 * spectrum, 60.0)
    groups = [Shared([weak] * 4, 288), Shared([weak] * 4, 288), Shared([strong] * 4, 288), Shared([strong] * 4, 288)]
    ranks = allocate("adaptive", groups, 4 * 288 + 16 * 3 * 48)
    totals = [sum(rank or 0 for rank in row or []) for row in ranks]
    assert sum(totals) == 16 * 3
    assert totals[2] + totals[3] > totals[0] + totals[1]
    assert allocate("uniform", groups, 4 * 288 + 16 * 3 * 48) == [[3] * 4] * 4


def test_layers_are_told_by_their_keys() -> None:
    """Whatever the number and order of groups in a layer."""
    spectrum = torch.linspace(5, 1, 5, dtype=torch.float64)
    weak, strong = Matrix(SHAPE, spectrum, 15.0).item, Matrix(SHAPE, 4 * spectrum, 60.0).item
    items: dict[Key, Item] = {(7, "up", 0): strong, (2, "up", 0): weak, (7, "down", 0): strong, (2, "down", 0): weak}
    found = [
        spending.allocate("adaptive", groups, 12 * 48)
        for groups in ([Group(items)], [Group({own: item}) for own, item in items.items()])
    ]
    assert found[0] == found[1]
    ranks = {own: rank_of(form) or 0 for own, form in found[0].items()}
    assert ranks[7, "up", 0] == ranks[7, "down", 0] == 2 * ranks[2, "up", 0] == 2 * ranks[2, "down", 0]


def test_ranks_and_measured_forms_share_a_budget() -> None:
    """One price for both: against all choices there are, at the sizes that a price leads to."""
    ladder, forms = random_matrix(3), [LowRank(0), Dense(), LowRank(1), LowRank(2)]
    items: dict[Key, Item] = {
        (0, "up", 0): ladder.item,
        (0, "down", 0): offered(forms, [0, 300, 50, 120], [4.0, 0.0, 2.5, 0.4]),
        (1, "up", 0): offered(forms, [0, 70, 20, 30], [0.5, 0.0, 0.3, 0.1]),
    }
    choices = [
        (sum(int(item.nbytes[i]) for item, i in chosen), math.fsum(item.losses[i] for item, i in chosen))
        for indices in itertools.product(*(range(len(item.forms)) for item in items.values()))
        if (chosen := list(zip(items.values(), indices, strict=True)))
    ]
    for size in {Group(items).at(price) for price in PRICES}:
        assert size is not None
        chosen = spending.allocate("water-filling", [Group(items)], size)
        places = {own: item.forms.index(chosen[own]) for own, item in items.items()}
        lost = math.fsum(item.losses[places[own]] for own, item in items.items())
        assert lost == pytest.approx(min(loss for taken, loss in choices if taken <= size), abs=1e-12)


def with_headers(groups: Sequence[Group], entry: int) -> Callable[[Forms], int]:
    """Files whose headers grow with the forms, in a way that the items know nothing of."""

    def planned(forms: Forms) -> int:
        total = 1000
        for group in groups:
            if group.items.keys() <= forms.keys():
                places = {own: item.forms.index(forms[own]) for own, item in group.items.items()}
                total += group.base_bytes + sum(int(group.items[own].nbytes[i]) for own, i in places.items())
                total += entry * sum(place > 0 for place in places.values())
            else:
                total += (group.native_bytes or 0) + entry * len(group.items)
        return total + -total % 8

    return planned


@each_problem
@pytest.mark.parametrize("entry", [0, 30])
def test_files_fit_with_their_headers(groups: list[Shared], entry: int) -> None:
    own = groups_of(groups)
    planned = with_headers(own, entry)
    least, most = (planned(spending.allocate("water-filling", own, size)) for size in byte_range(own))
    sizes = [planned(spending.fit("water-filling", own, size, planned)) for size in range(least, most + 50, 23)]
    assert all(size <= target for size, target in zip(sizes, range(least, most + 50, 23), strict=True))
    assert max(sizes) == most


@pytest.mark.parametrize("short", [1, 8, 60])
def test_a_few_bytes_too_few_for_a_choice_leave_no_more_than_a_step_unspent(short: int) -> None:
    """Budgets that are a few bytes apart buy the same, so that a step less is needed."""
    shape = 1000, 1000
    own = groups_of([Shared([random_matrix(seed, shape) for seed in range(4)], 0)])
    planned, step = with_headers(own, 30), ITEMSIZE * sum(shape)
    target = planned(spending.allocate("water-filling", own, 1000 * step)) - short
    assert 0 <= target - planned(spending.fit("water-filling", own, target, planned)) < step


def test_no_budget_is_small_enough() -> None:
    own = groups_of(PROBLEMS["one group"])
    with pytest.raises(UsageError, match="cannot be made small enough for 900 B in all"):
        spending.fit("water-filling", own, 900, with_headers(own, 30))
