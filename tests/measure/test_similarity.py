"""Similarity, energy and sensitivity: the identities that make the numbers mean what they are called."""

import math

import pytest
import torch
from draws import normal64
from torch import Tensor

from moetool.measure import similarity as analysis
from moetool.measure.similarity import energy_retention, pairwise_cka, relative_error_cost


def orthogonal(size: int, seed: int = 9) -> Tensor:
    return torch.linalg.qr(normal64(size, size, seed=seed)).Q


def cka_of(left: Tensor, right: Tensor) -> float:
    return pairwise_cka([left, right])[0, 1].item()


def cka_by_definition(left: Tensor, right: Tensor) -> float:
    """tr(KHLH) / √(tr(KHKH) tr(LHLH)), letter by letter."""
    n = len(left)
    h = torch.eye(n, dtype=torch.float64) - torch.full((n, n), 1 / n, dtype=torch.float64)
    k, l = left @ left.T, right @ right.T  # noqa: E741
    return (torch.trace(k @ h @ l @ h) / torch.sqrt(torch.trace(k @ h @ k @ h) * torch.trace(l @ h @ l @ h))).item()


# Few columns take the way by pairs, many the way by kernels; widths may differ.
SHAPES = [((9, 4), (9, 4)), ((9, 30), (9, 30)), ((40, 3), (40, 5)), ((9, 1), (9, 20)), ((2, 7), (2, 7))]


@pytest.mark.parametrize(("one", "other"), SHAPES)
def test_cka_is_its_definition(one: tuple[int, int], other: tuple[int, int]) -> None:
    left, right = normal64(*one), normal64(*other, seed=1) + 3
    assert cka_of(left, right) == pytest.approx(cka_by_definition(left, right), abs=1e-12)


@pytest.mark.parametrize("shape", [(40, 3), (9, 30)])
def test_cka_identities(shape: tuple[int, int]) -> None:
    left, right = normal64(*shape), normal64(*shape, seed=1)
    cka = cka_of(left, right)
    assert 0 < cka < 0.99
    assert cka_of(left, left) == pytest.approx(1, abs=1e-14)
    assert cka_of(right, left) == pytest.approx(cka, abs=1e-14)
    assert cka_of(left @ orthogonal(shape[1]), right) == pytest.approx(cka, abs=1e-12)
    assert cka_of(-1e-3 * left, right) == pytest.approx(cka, abs=1e-12)
    assert cka_of(left + normal64(shape[1], seed=2), right) == pytest.approx(cka, abs=1e-12), "it is centred"
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(3))
    assert cka_of(left[order], right[order]) == pytest.approx(cka, abs=1e-12)
    assert abs(cka_of(left[order], right) - cka) > 1e-3, "rows belong together"
    stretched = left * torch.arange(1, shape[1] + 1)
    assert abs(cka_of(stretched, right) - cka) > 1e-3, "not every linear map leaves it unchanged"


def test_cka_of_what_has_nothing_in_common() -> None:
    """Columns orthogonal to those of the other, and to the mean."""
    basis = torch.linalg.qr(torch.cat([torch.ones(8, 1, dtype=torch.float64), normal64(8, 6)], dim=1)).Q
    assert cka_of(basis[:, 1:4], basis[:, 4:]) == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("constant", [torch.zeros(6, 3), torch.full((6, 3), 0.1), torch.full((6, 3), 1 / 3).double()])
def test_cka_of_rows_that_are_all_the_same(constant: Tensor) -> None:
    """There is nothing to align, and rounding is not taken for something."""
    result = pairwise_cka([constant, normal64(6, 3), normal64(6, 3, seed=1)])
    assert result.isnan().tolist() == [[True, True, True], [True, False, False], [True, False, False]]
    assert math.isnan(cka_of(constant, normal64(6, 20)))


@pytest.mark.parametrize("widths", [[50] * 5, [3] * 5, [1, 60, 2, 7]])
@pytest.mark.parametrize("slab", [(1, 1), (7, 1), (64, 10**9)])
def test_pairwise_is_every_pair(monkeypatch: pytest.MonkeyPatch, widths: list[int], slab: tuple[int, int]) -> None:
    """However the kernels are cut."""
    monkeypatch.setattr(analysis, "_SLAB_ROWS", slab[0])
    monkeypatch.setattr(analysis, "_SLAB_BYTES", slab[1])
    shared = normal64(30, 60)
    matrices = [shared[:, :width] + normal64(30, width, seed=1 + e) for e, width in enumerate(widths)]
    result = pairwise_cka(matrices)
    expected = [[cka_by_definition(left, right) for right in matrices] for left in matrices]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(result, result.T)


def test_both_ways_agree() -> None:
    matrices = [normal64(20, 12, seed=e) + 1 for e in range(4)]
    means = [matrix.mean(0) for matrix in matrices]
    torch.testing.assert_close(
        analysis._by_pair(matrices, means), analysis._by_kernel(matrices, means), rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cka_is_exact_in_any_dtype(dtype: torch.dtype) -> None:
    """A large common mean would drown everything in less than fp64."""
    left, right = (normal64(16, 40, seed=e).add(100).to(dtype) for e in range(2))
    assert cka_of(left, right) == pytest.approx(cka_by_definition(left.double(), right.double()), abs=1e-8)


def test_cka_refuses() -> None:
    with pytest.raises(ValueError, match=r"\[3, 2\], \[4, 2\]"):
        cka_of(normal64(3, 2), normal64(4, 2))
    with pytest.raises(ValueError, match="matrices"):
        cka_of(normal64(3), normal64(3))


SHARES = [share / 100 for share in range(0, 101, 5)]


@pytest.mark.parametrize("size", [1, 4, 10, 33])
def test_energy_of_an_orthogonal_matrix_is_the_share(size: int) -> None:
    torch.testing.assert_close(
        energy_retention(3 * orthogonal(size), SHARES), torch.tensor(SHARES, dtype=torch.float64), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("shape", [(20, 30), (30, 20)])
def test_energy_is_that_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = normal64(*shape)
    squared = torch.linalg.svdvals(matrix).square()
    expected = [(squared[: round(20 * share)].sum() / squared.sum()).item() for share in SHARES]
    assert energy_retention(matrix, SHARES).tolist() == pytest.approx(expected, abs=1e-13)
    turned = orthogonal(shape[0]) @ matrix @ orthogonal(shape[1])
    assert energy_retention(-7 * turned, SHARES).tolist() == pytest.approx(expected, abs=1e-12)


def test_energy_between_two_singular_values() -> None:
    diagonal = torch.diag(torch.tensor([1.0, 2.0]))  # energies 4 and 1
    assert energy_retention(diagonal, [0.25, 0.5, 0.75, 1]).tolist() == pytest.approx([0.4, 0.8, 0.9, 1], abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_energy_grows_to_one(dtype: torch.dtype) -> None:
    retained = energy_retention(normal64(17, 40).to(dtype), SHARES)
    assert retained.dtype == torch.float64
    assert retained[0] == 0
    assert retained[-1] == 1
    assert bool((retained.diff() > 0).all())
    assert bool((retained.diff().diff() < 1e-12).all()), "the largest come first"
    assert bool((retained >= torch.tensor(SHARES, dtype=torch.float64) - 1e-12).all())


def test_energy_of_low_rank_is_all_there() -> None:
    product = normal64(30, 3) @ normal64(3, 20, seed=1)
    assert energy_retention(product, [3 / 20, 0.5]).tolist() == pytest.approx([1, 1], abs=1e-13)
    assert energy_retention(product, [2 / 20]).item() < 0.999


def test_energy_of_nothing_is_undefined() -> None:
    assert bool(energy_retention(torch.zeros(3, 4), [0.1, 0.5]).isnan().all())


@pytest.mark.parametrize("share", [-0.1, 1.1, 10, math.nan])
def test_energy_refuses_what_is_no_share(share: float) -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        energy_retention(normal64(3, 4), [0.5, share])


def test_cost_is_that_of_random_errors() -> None:
    """`½ Σ F e²` over errors of relative size ε, on average, is `½ ε²` times the number."""
    information, matrix, epsilon = normal64(6, 50).square(), normal64(6, 50, seed=1), 0.01
    errors = normal64(4000, 6, 50, seed=2)
    errors *= epsilon * matrix.norm() / errors.flatten(1).norm(dim=1)[:, None, None]
    measured = (information * errors.square()).sum((1, 2)).mean().item()
    cost = relative_error_cost(information.sum(1), matrix)
    assert measured == pytest.approx(epsilon**2 * cost, rel=0.01)


def test_cost_does_not_depend_on_units() -> None:
    """Weights ten times as large have gradients ten times as small."""
    information, matrix = normal64(6, 50).square(), normal64(6, 50, seed=1)
    cost = relative_error_cost(information.sum(1), matrix)
    assert relative_error_cost(information.sum(1) / 100, 10 * matrix) == pytest.approx(cost, rel=1e-13)
