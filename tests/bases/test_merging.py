"""One base out of all experts: the identities that each merge must satisfy."""

from typing import get_args

import pytest
import torch
from draws import normal64
from torch import Tensor

from moetool.bases.choices import UNMEASURED_MERGES, Merge
from moetool.bases.merging import (
    Regression,
    fisher_base,
    frequency_base,
    mean_base,
    merge,
    regmean_base,
    ties_base,
)
from moetool.errors import UsageError

E, SHAPE = 4, (6, 5)


@pytest.fixture
def weights() -> Tensor:
    """`[E, out, in]` fp64, so that identities are sharp."""
    return normal64(E, *SHAPE, seed=0)


def fisher(weights: Tensor, information: Tensor) -> Tensor:
    """`fisher_base` from F `[E, out, in]`."""
    return fisher_base((information * weights).sum(0), information.sum(0), weights.mean(0))


def test_equal_fisher_is_the_mean(weights: Tensor) -> None:
    torch.testing.assert_close(fisher(weights, torch.full_like(weights, 0.37)), weights.mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("expert", range(E))
def test_one_hot_fisher_is_that_expert(weights: Tensor, expert: int) -> None:
    information = torch.zeros_like(weights)
    information[expert] = normal64(*SHAPE, seed=1).square() + 1e-3
    torch.testing.assert_close(fisher(weights, information), weights[expert], rtol=1e-15, atol=0)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 7.0, 1e9])
def test_scaling_fisher_changes_nothing(weights: Tensor, scale: float) -> None:
    information = normal64(E, *SHAPE, seed=1).square()
    torch.testing.assert_close(fisher(weights, scale * information), fisher(weights, information), rtol=0, atol=1e-14)


def test_weighted_differences_cancel(weights: Tensor) -> None:
    """`Σ F_j (W_b - W_j) = 0`, element by element: the base minimises the Fisher-weighted squared differences."""
    information = normal64(E, *SHAPE, seed=1).square()
    base = fisher(weights, information)
    torch.testing.assert_close((information * (base - weights)).sum(0), torch.zeros_like(base), rtol=0, atol=1e-14)


def test_fisher_is_between_the_experts(weights: Tensor) -> None:
    base = fisher(weights, normal64(E, *SHAPE, seed=1).square())
    assert (base <= weights.amax(0)).all()
    assert (base >= weights.amin(0)).all()
    assert not base.allclose(weights.mean(0))


@pytest.mark.parametrize("nothing", [0.0, 1e-38])
def test_no_information_is_the_mean(weights: Tensor, nothing: float) -> None:
    """Where ΣF is zero or has underflowed; elsewhere the merge is not disturbed."""
    information = normal64(E, *SHAPE, seed=1).square() + 0.1
    expected = fisher(weights, information)
    information[:, 2, 3] = nothing
    base = fisher(weights, information)
    assert base[2, 3] == weights[:, 2, 3].mean()
    base[2, 3] = expected[2, 3]
    assert base.equal(expected)
    assert torch.isfinite(base).all()


def test_mean(weights: Tensor) -> None:
    torch.testing.assert_close(mean_base(list(weights.float())), weights.mean(0).float(), rtol=1e-6, atol=1e-7)


def test_the_mean_of_bf16_is_taken_in_fp32() -> None:
    """256 + 1 is 256 in bf16; a bf16 sum would lose every small expert."""
    weights = [torch.full(SHAPE, 256.0, dtype=torch.bfloat16)] + 3 * [torch.ones(SHAPE, dtype=torch.bfloat16)]
    base = mean_base(weights)
    assert base.dtype == torch.float32
    assert base.equal(torch.full(SHAPE, 259 / 4))


def test_frequency_by_hand(weights: Tensor) -> None:
    base = frequency_base(list(weights.float()), torch.tensor([3, 0, 1, 0]))
    torch.testing.assert_close(base, (0.75 * weights[0] + 0.25 * weights[2]).float(), rtol=1e-6, atol=1e-6)


def test_equal_frequencies_are_the_mean(weights: Tensor) -> None:
    rows = list(weights.float())
    torch.testing.assert_close(frequency_base(rows, torch.full((E,), 11)), mean_base(rows), rtol=1e-6, atol=1e-6)


def test_one_used_expert_is_the_base(weights: Tensor) -> None:
    rows = list(weights.float())
    assert frequency_base(rows, torch.tensor([0, 0, 5, 0])).equal(rows[2])


def test_no_tokens_at_all_is_the_mean(weights: Tensor) -> None:
    rows = list(weights.float())
    assert frequency_base(rows, torch.zeros(E, dtype=torch.int64)).equal(mean_base(rows))


def test_merge_finds_the_role(weights: Tensor) -> None:
    rows = list(weights.float())
    tokens = torch.tensor([3, 0, 1, 0])
    total = {role: torch.full(SHAPE, float(E)) for role in ("gate", "up", "down")}
    weighted = {"gate": torch.zeros(SHAPE), "up": torch.full(SHAPE, 8.0), "down": torch.full(SHAPE, -4.0)}
    assert merge("mean", "up", rows).equal(mean_base(rows))
    assert merge("frequency", "up", rows, tokens).equal(frequency_base(rows, tokens))
    assert merge("fisher", "up", rows, tokens, (weighted, total)).equal(torch.full(SHAPE, 2.0))
    assert merge("fisher", "down", rows, tokens, (weighted, total)).equal(torch.full(SHAPE, -1.0))


@pytest.mark.parametrize("method", sorted(set(get_args(Merge)) - set(UNMEASURED_MERGES)))
def test_measured_merges_need_text(weights: Tensor, method: Merge) -> None:
    with pytest.raises(UsageError, match=f"--merge {method} needs calibration text"):
        merge(method, "up", list(weights))


def test_ties_of_equal_experts_is_the_expert(weights: Tensor) -> None:
    assert ties_base([weights[0].float()] * E).equal(mean_base([weights[0].float()] * E))


def test_ties_by_hand() -> None:
    """The mean is 0. Each keeps one entry of two: 4, -3 and -5. In the first column -5 outweighs 4."""
    rows = [torch.tensor([[4.0, 1.0]]), torch.tensor([[1.0, -3.0]]), torch.tensor([[-5.0, 2.0]])]
    assert mean_base(rows).equal(torch.zeros(1, 2))
    assert ties_base(rows, density=0.5).equal(torch.tensor([[-5.0, -3.0]]))
    assert ties_base(rows, density=1.0).equal(torch.tensor([[0.0, 0.0]])), "untrimmed differences cancel: no sign wins"


def test_ties_ignores_what_it_trims(weights: Tensor) -> None:
    rows = list(weights.float())
    base = ties_base(rows)
    differences = torch.stack([(row - mean_base(rows)).abs() for row in rows])
    kept = differences >= differences.flatten(1).kthvalue(30 - 6 + 1).values[:, None, None]
    assert base[~kept.any(0)].equal(mean_base(rows)[~kept.any(0)])
    assert not base.equal(mean_base(rows))


def regression(weights: Tensor, inputs: Tensor) -> Regression:
    """From inputs `[E, tokens, in]`."""
    grams = inputs.transpose(1, 2) @ inputs
    return Regression((weights @ grams).sum(0), grams.sum(0), grams.diagonal(dim1=1, dim2=2))


def test_regmean_is_least_squares_on_each_experts_own_inputs(weights: Tensor) -> None:
    """Without shrinkage it minimises Σ ‖(W_b - W_j) X_j‖², so the gradient Σ (W_b - W_j) G_j vanishes."""
    inputs = normal64(E, 40, SHAPE[1], seed=5)
    grams = inputs.transpose(1, 2) @ inputs
    base = regmean_base(list(weights), regression(weights, inputs), alpha=0.999999).double()
    gradient = ((base - weights) @ grams).sum(0)
    assert gradient.abs().max() < 1e-3 * (weights @ grams).abs().max()


def test_regmean_of_equal_inputs_is_the_mean(weights: Tensor) -> None:
    inputs = normal64(1, 40, SHAPE[1], seed=5).expand(E, -1, -1)
    base = regmean_base(list(weights), regression(weights, inputs))
    torch.testing.assert_close(base, weights.mean(0).float(), rtol=1e-5, atol=1e-6)


def test_regmean_of_one_used_expert_is_that_expert(weights: Tensor) -> None:
    inputs = torch.zeros(E, 40, SHAPE[1], dtype=torch.float64)
    inputs[2] = normal64(40, SHAPE[1], seed=5)
    base = regmean_base(list(weights), regression(weights, inputs))
    torch.testing.assert_close(base, weights[2].float(), rtol=1e-5, atol=1e-6)


def test_regmean_where_nothing_came_in_is_the_mean(weights: Tensor) -> None:
    inputs = normal64(E, 40, SHAPE[1], seed=5)
    inputs[:, :, 3] = 0
    base = regmean_base(list(weights), regression(weights, inputs))
    torch.testing.assert_close(base[:, 3], weights.mean(0).float()[:, 3])
    assert torch.isfinite(base).all()
