"""Balanced assignment against the Hungarian algorithm, and k-means with clusters of equal size."""

import hashlib
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moetool.numerics.balanced_assignment import Assignment, balanced_assignment
from moetool.numerics.balanced_kmeans import balanced_kmeans

Costs = Callable[[np.random.Generator, int, int], NDArray[np.float64]]

COSTS: dict[str, Costs] = {
    "normal, negative too": lambda g, n, k: g.normal(size=(n, k)),
    "few integers": lambda g, n, k: g.integers(0, 4, (n, k)).astype(np.float64),
    "constant": lambda g, n, k: np.full((n, k), -2.5),
    "constant rows": lambda g, n, k: g.integers(-9, 9, (n, 1)) + np.zeros((1, k)),
    "duplicate points": lambda g, n, k: np.repeat(g.normal(size=(n // k, k)), k, axis=0),
    "duplicate clusters": lambda g, n, k: np.repeat(g.normal(size=(n, 1)), k, axis=1) + g.integers(0, 2, (1, k)),
    "one popular cluster": lambda g, n, k: g.normal(size=(n, k)) - 100 * (np.arange(k) == 0),
    "tiny": lambda g, n, k: g.normal(size=(n, k)) * 1e-300,
    "huge": lambda g, n, k: g.normal(size=(n, k)) * 1e300,
    "thirty orders of magnitude": lambda g, n, k: np.exp(12 * g.normal(size=(n, k))),
    "large offset": lambda g, n, k: g.normal(size=(n, k)) + 1e6,
    "rank one": lambda g, n, k: g.normal(size=(n, 1)) * g.normal(size=(1, k)),
    "line": lambda g, n, k: (np.sort(g.normal(size=(n, 1)), axis=0) - np.sort(g.normal(size=(1, k)))) ** 2,
}


def total(cost: NDArray[np.floating], labels: NDArray[np.int64]) -> float:
    return float(cost[np.arange(len(cost)), labels].sum(dtype=np.float64))


def hungarian(cost: NDArray[np.floating]) -> NDArray[np.int64]:
    points, clusters = cost.shape
    size = points // clusters
    return linear_sum_assignment(np.repeat(cost, size, axis=1))[1] // size


def assert_optimal_by_duality(cost: NDArray[np.floating], found: Assignment) -> None:
    """Weak duality bounds the cost of any balanced labels from below; these must reach the bound."""
    size = len(cost) // cost.shape[1]
    bound = float((cost + found.prices).min(axis=1).sum() - size * found.prices.sum())
    scale = float(np.abs(cost[np.arange(len(cost)), found.labels]).sum() + np.abs(found.prices).sum() * size)
    assert abs(total(cost, found.labels) - bound) <= 1e-12 * scale


def assert_equal_sizes(labels: NDArray[np.int64], clusters: int) -> None:
    assert labels.dtype == np.int64
    assert np.bincount(labels, minlength=clusters).tolist() == [len(labels) // clusters] * clusters


def weak_clusters(n: int, d: int, clusters: int, seed: int = 0) -> Tensor:
    """[n, d] with a power-law spectrum."""
    stream = torch.Generator().manual_seed(seed)
    centres = 0.3 * torch.randn(clusters, d, generator=stream)
    points = torch.randn(n, d, generator=stream) + centres[torch.randint(clusters, (n,), generator=stream)]
    return points * torch.arange(1, d + 1) ** -0.5


def objective(rows: Tensor, labels: Tensor) -> float:
    rows = rows.double()
    clusters = int(labels.max()) + 1
    means = torch.stack([rows[labels == cluster].mean(dim=0) for cluster in range(clusters)])
    return float((rows - means[labels]).square().sum())


@pytest.mark.parametrize("kind", COSTS)
def test_assignment_costs_what_the_hungarian_one_does(kind: str) -> None:
    stream = np.random.default_rng(len(kind))
    for clusters, size in [(1, 1), (1, 7), (2, 1), (2, 30), (3, 5), (5, 5), (8, 12), (13, 4), (16, 16), (40, 1)]:
        cost = COSTS[kind](stream, clusters * size, clusters)
        found = balanced_assignment(cost)
        assert_equal_sizes(found.labels, clusters)
        least = hungarian(cost)
        scale = float(np.abs(cost[np.arange(len(cost)), least]).sum())
        assert abs(total(cost, found.labels) - total(cost, least)) <= 1e-12 * scale
        assert_optimal_by_duality(cost, found)


def test_assignment_of_many_small_problems() -> None:
    stream = np.random.default_rng(0)
    for _ in range(300):
        clusters, size = int(stream.integers(1, 9)), int(stream.integers(1, 9))
        cost = stream.integers(-5, 6, (clusters * size, clusters)).astype(np.float64)
        found = balanced_assignment(cost)
        assert_equal_sizes(found.labels, clusters)
        assert total(cost, found.labels) == total(cost, hungarian(cost))


def test_assignment_in_fp32_is_optimal_for_the_given_numbers() -> None:
    cost = torch.cdist(weak_clusters(512, 32, 16), weak_clusters(16, 32, 16, seed=1)).square().numpy()
    assert cost.dtype == np.float32
    before = cost.copy()
    found = balanced_assignment(cost)
    assert np.array_equal(cost, before)
    assert total(cost, found.labels) == pytest.approx(total(cost, hungarian(cost)), rel=1e-12)


def test_assignment_of_a_whole_layer_is_proved_optimal() -> None:
    rows = weak_clusters(14336, 64, 128)
    cost = torch.cdist(rows, rows[:128]).square().numpy()
    found = balanced_assignment(cost)
    assert_equal_sizes(found.labels, 128)
    assert_optimal_by_duality(cost, found)


@pytest.mark.parametrize("shape", [(7, 2), (2, 4), (4, 0), (0, 2), (0, 0)])
def test_assignment_needs_clusters_that_divide_the_points(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="equal size"):
        balanced_assignment(np.zeros(shape))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_costs_must_be_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        balanced_assignment(np.array([[1.0, bad], [0.0, 0.0]]))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_objective_never_rises(seed: int) -> None:
    rows = weak_clusters(768, 48, 12)
    energy = [objective(rows, balanced_kmeans(rows, 12, seed=seed, iterations=count)) for count in range(1, 25)]
    assert all(after <= before for before, after in itertools.pairwise(energy))
    assert energy[-1] < 0.97 * energy[0]
    assert energy[-1] == energy[-2]


def test_result_is_a_fixed_point() -> None:
    rows = weak_clusters(512, 16, 8)
    labels = balanced_kmeans(rows, 8, seed=0, iterations=200)
    means = torch.stack([rows[labels == cluster].mean(dim=0) for cluster in range(8)])
    cost = torch.cdist(rows.double(), means.double()).square().numpy()
    assert total(cost, labels.numpy()) == pytest.approx(total(cost, hungarian(cost)), rel=1e-6)


def test_clear_clusters_are_found() -> None:
    truth = torch.arange(20).repeat(16)
    stream = torch.Generator().manual_seed(0)
    rows = 20 * torch.randn(20, 100, generator=stream)[truth] + torch.randn(320, 100, generator=stream)
    labels = balanced_kmeans(rows, 20, seed=3)
    assert len(set(zip(truth.tolist(), labels.tolist(), strict=True))) == 20


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_and_scale(dtype: torch.dtype) -> None:
    rows = weak_clusters(240, 80, 6).to(torch.bfloat16)
    expected = balanced_kmeans(rows, 6, seed=1)
    assert balanced_kmeans(rows.to(dtype), 6, seed=1).equal(expected)
    power = {torch.float16: 4, torch.bfloat16: 120, torch.float32: 120, torch.float64: 900}[dtype]
    assert balanced_kmeans(rows.to(dtype) * 2.0**power, 6, seed=1).equal(expected)


def test_same_bytes_for_the_same_seed() -> None:
    rows = weak_clusters(600, 96, 10)
    state = torch.random.get_rng_state()
    hashes = {hashlib.sha256(balanced_kmeans(rows, 10, seed=5).numpy().tobytes()).hexdigest() for _ in range(3)}
    assert len(hashes) == 1
    assert torch.random.get_rng_state().equal(state)
    assert not balanced_kmeans(rows, 10, seed=6).equal(balanced_kmeans(rows, 10, seed=5))


@pytest.mark.parametrize("clusters", [1, 2, 12, 24])
def test_equal_and_duplicate_rows(clusters: int) -> None:
    for rows in (torch.zeros(24, 5), torch.full((24, 5), 1.1), torch.eye(3).repeat(8, 1), torch.ones(24, 1)):
        assert_equal_sizes(balanced_kmeans(rows, clusters, seed=0).numpy(), clusters)


def test_rows_of_very_different_length() -> None:
    rows = weak_clusters(2048, 32, 32)
    rows *= torch.randn(2048, 1, generator=torch.Generator().manual_seed(1)).exp()
    rows[::5] = 0
    cost = torch.cdist(rows, rows[1:160:5]).square().numpy()
    found = balanced_assignment(cost)
    assert_equal_sizes(found.labels, 32)
    assert_optimal_by_duality(cost, found)


def test_duplicates_stay_together() -> None:
    rows = torch.randn(6, 100, generator=torch.Generator().manual_seed(0)).repeat(8, 1)
    assert objective(rows, balanced_kmeans(rows, 6, seed=0)) < 1e-9


def test_as_many_clusters_as_rows() -> None:
    assert balanced_kmeans(weak_clusters(50, 7, 5), 50, seed=0).sort().values.equal(torch.arange(50))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_must_be_finite(bad: float) -> None:
    rows = torch.zeros(8, 3)
    rows[2, 1] = bad
    with pytest.raises(ValueError, match="finite"):
        balanced_kmeans(rows, 2, seed=0)


@pytest.mark.parametrize(
    ("shape", "clusters", "iterations"),
    [((8, 3), 3, 1), ((8, 3), 0, 1), ((8, 3), -2, 1), ((8, 3), 16, 1), ((8,), 2, 1), ((8, 0), 2, 1), ((8, 3), 2, 0)],
)
def test_bad_arguments(shape: tuple[int, ...], clusters: int, iterations: int) -> None:
    with pytest.raises(ValueError):
        balanced_kmeans(torch.zeros(shape), clusters, seed=0, iterations=iterations)
