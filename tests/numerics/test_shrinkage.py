from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moetool.numerics.factorize import factorize, truncate, whitened_error
from moetool.numerics.shrinkage import shrink

Build = Callable[..., Tensor]


def test_is_the_weighted_mean_scaled_to_the_tokens() -> None:
    gram, mean = torch.diag(torch.tensor([8.0, 0.0])).double(), torch.eye(2).double()
    # T = 4, T0 = 12: rho = 3/4, so 4 * (1/4 * [2, 0] + 3/4 * [1, 1]) = [5, 3].
    expected = torch.diag(torch.tensor([5.0, 3.0])).double()
    assert torch.allclose(shrink(gram, 4, mean, pseudo_count=12), expected, rtol=0, atol=1e-15)


def test_default_prior_is_a_quarter_of_the_dimension(make_gram: Build) -> None:
    gram, mean = make_gram(32, 1e4), make_gram(32, 1e2, seed=1)
    assert torch.equal(shrink(gram, 5, mean), shrink(gram, 5, mean, pseudo_count=8))
    assert not torch.equal(shrink(gram, 5, mean), shrink(gram, 5, mean, pseudo_count=9))


def test_limits(make_gram: Build) -> None:
    gram, mean = make_gram(16, 1e4), make_gram(16, 1e2, seed=1)
    many = 10**12
    assert torch.allclose(shrink(gram * many, many, mean) / many, gram, rtol=1e-9, atol=1e-12)
    assert torch.equal(shrink(torch.zeros_like(gram), 0, mean), mean)
    assert torch.equal(shrink(gram, 7, mean, pseudo_count=0), gram)
    nothing = shrink(torch.zeros_like(gram), 0, mean)
    nothing += 1  # the layer's mean is not handed out for changing
    assert torch.equal(mean, make_gram(16, 1e2, seed=1))


def test_average_of_equal_experts_is_unchanged(make_gram: Build) -> None:
    mean = make_gram(16, 1e4)
    assert torch.allclose(shrink(mean * 9, 9, mean), mean * 9, rtol=1e-14)


def test_makes_few_tokens_definite(make_gram: Build) -> None:
    tokens = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gram = tokens.T @ tokens
    assert torch.linalg.matrix_rank(gram) == 4
    torch.linalg.cholesky(shrink(gram, 4, make_gram(32, 1e4)))


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        shrink(torch.eye(2), -1, torch.eye(2))
    with pytest.raises(ValueError, match="negative"):
        shrink(torch.eye(2), 1, torch.eye(2), pseudo_count=-1)


@pytest.mark.parametrize("side", ["input", "output"])
def test_held_out_error_of_experts_with_few_tokens(make_delta: Build, make_gram: Build, side: str) -> None:
    n, out, experts, k = 64, 96, 6, 32
    generator = torch.Generator().manual_seed(2)
    common = make_gram(n, 1e3)
    truths = [common / common.trace() + 0.5 * g / g.trace() for g in (make_gram(n, 1e2, seed=s) for s in range(9, 15))]
    deltas = [make_delta(out, n, seed=e) for e in range(experts)]
    excess: dict[tuple[int, str], float] = {}
    for count in (n // 2, 16 * n):
        roots = [torch.linalg.cholesky(truth) for truth in truths]
        samples = [torch.randn(count, n, dtype=torch.float64, generator=generator) @ root.T for root in roots]
        grams = [sample.T @ sample for sample in samples]
        mean = torch.stack(grams).sum(0) / (experts * count)
        for delta, truth, gram in zip(deltas, truths, grams, strict=True):
            best = whitened_error(delta, *truncate(delta, factorize(delta, gram=truth), k, torch.float32), gram=truth)
            wide = delta.double()
            for name in ("raw", "shrunk"):
                if side == "input":
                    found = factorize(delta, gram=gram if name == "raw" else shrink(gram, count, mean))
                else:
                    seen, average = wide @ gram @ wide.T, wide @ mean @ wide.T
                    used = seen if name == "raw" else shrink(seen, count, average, pseudo_count=0.25 * n)
                    found = factorize(delta, output_gram=used)
                error = whitened_error(delta, *truncate(delta, found, k, torch.float32), gram=truth)
                excess[count, name] = excess.get((count, name), 0.0) + 100 * ((error / best) ** 0.5 - 1) / experts
    few, many = n // 2, 16 * n
    assert excess[few, "shrunk"] < 0.9 * excess[few, "raw"]
    assert excess[few, "shrunk"] <= 60
    assert excess[many, "shrunk"] <= excess[many, "raw"] + 1
