"""Index sets from a seed: pinned, of exact size, uniform."""

import hashlib
import itertools

import numpy as np
import pytest
import torch

from moetool.numerics import sampling
from moetool.numerics.counter import key, words
from moetool.numerics.sampling import sample, scatter


def test_pinned_sets() -> None:
    assert sample(100, 10, 1).tolist() == [0, 3, 15, 21, 31, 48, 52, 70, 88, 89]
    assert sample(100, 10, 2).tolist() == [3, 5, 12, 28, 39, 44, 45, 72, 79, 88]


@pytest.mark.parametrize(
    ("n", "k", "starts"),
    [
        (196608, 19661, "f457201cc1cbfe94"),
        (196608, 98304, "ecffd6b83503eab8"),
        (1 << 20, 105, "a037b0694fd86922"),  # gaps longer than the table
        (3_000_000, 2_000_000, "01ea745771f2333b"),  # several blocks
    ],
)
def test_pinned_hashes(n: int, k: int, starts: str) -> None:
    assert hashlib.sha256(sample(n, k, 7).astype("<i4").tobytes()).hexdigest()[:16] == starts


@pytest.mark.parametrize(("n", "k"), [(300_000, 30_000), (300_000, 299_000), (50_000_000, 40)])
def test_block_size_does_not_matter(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sample(n, k, 9)
    for block in (1, 17, 1 << 10):
        if k // (4 * block) < 20_000:
            monkeypatch.setattr(sampling, "_BLOCK", block)
            assert np.array_equal(sample(n, k, 9), whole)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 257, 4096])
def test_exactly_k_different_ascending_numbers(n: int) -> None:
    for k in {0, 1, n // 3, n // 2, max(n - 1, 0), n}:
        for seed in range(20):
            found = sample(n, k, key(seed))
            assert found.dtype == np.int32
            assert len(found) == k
            assert (np.diff(found) > 0).all()
            assert k == 0 or (found[0] >= 0 and found[-1] < n)


def test_every_set_is_equally_likely() -> None:
    """All 20 sets of 3 of 6, 20,000 seeds: a chi-square of 19 degrees of freedom is above 51 once in 10,000 times."""
    counts = dict.fromkeys(itertools.combinations(range(6), 3), 0)
    for seed in range(20_000):
        counts[tuple(sample(6, 3, key(seed)).tolist())] += 1
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 51


def test_elements_and_pairs_are_kept_as_often_as_they_should() -> None:
    """k/n of the time each, and k (k - 1) / (n (n - 1)) together, whatever their distance."""
    n, k, draws = 400, 40, 10_000
    kept = np.zeros((draws, n), dtype=np.float32)
    for seed in range(draws):
        kept[seed, sample(n, k, key(seed, "marginals"))] = 1
    rate = k / n
    deviation = (kept.mean(0) - rate) / np.sqrt(rate * (1 - rate) / draws)
    assert abs(deviation).max() < 4.5
    assert 0.85 < deviation.var() < 1.2
    both = k * (k - 1) / (n * (n - 1))
    for distance in (1, 2, 7, 100):
        share = (kept[:, :-distance] * kept[:, distance:]).mean()
        assert abs(share - both) < 5 * np.sqrt(both / (draws * (n - distance)))


def test_the_walk_is_that_of_independent_elements() -> None:
    """Gaps found by bisection of all 64 bits, in Python's whole numbers."""
    n, k, stream = 20_000, 1234, 5
    buffer, found = sampling._bernoulli(n, k, stream)
    bounds, survival = [], 1 << 128
    while survival >> 64:
        survival = survival * (n - k) // n
        bounds.append(((1 << 128) - survival) >> 64)
    expected, position, draw = [], -1, 0
    quarters = words(key(stream, "gaps"), 0, 1000).view("<u2").tolist()
    fine = words(key(stream, "fine"), 0, 4000).tolist()
    while True:
        number = quarters[draw] << 48 | fine[draw] >> 16
        position += 1 + sum(bound <= number for bound in bounds)
        draw += 1
        if position >= n:
            break
        expected.append(position)
    assert buffer[:found].tolist() == expected


def test_both_corrections_occur_and_leave_uniform_sets() -> None:
    surplus = [sampling._bernoulli(10_000, 1000, key(seed))[1] - 1000 for seed in range(200)]
    assert min(surplus) < -30
    assert max(surplus) > 30
    assert abs(np.mean(surplus)) < 5 * 30 / np.sqrt(200)


@pytest.mark.parametrize(("n", "k"), [(5, 6), (5, -1), ((1 << 30) + 1, 3), (-1, 0)])
def test_nonsense(n: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot choose"):
        sample(n, k, 0)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 17])
@pytest.mark.parametrize("k", [0, 1, 33, 100])
def test_scatter_overwrites_everything(chunk: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_CHUNK", chunk)
    indices = torch.from_numpy(sample(100, k, 4))
    values = torch.arange(1, k + 1).bfloat16()
    expected = torch.zeros(100, dtype=torch.bfloat16)
    expected[indices.long()] = values
    assert scatter(values, indices, torch.full((100,), 7.0, dtype=torch.bfloat16)).equal(expected)
