"""One stored matrix: its tensors, its forward, the matrix it stands for."""

import pytest
import torch
from torch import Tensor

from moetool.errors import InvalidInputError
from moetool.representations import Representation, parse_representation, representations
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank, break_even_rank

SHAPE = (7, 5)
CPU = torch.device("cpu")


def filled(representation: Representation, shape: tuple[int, int] = SHAPE, dtype: torch.dtype = torch.float64):
    """A `Weight` with random parameters."""
    generator = torch.Generator().manual_seed(3)
    weight = representation.build(shape, dtype, CPU)
    with torch.no_grad():
        for parameter in weight.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return weight


def inputs(tokens: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(tokens, SHAPE[1], generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)


def test_specs_are_what_config_json_says() -> None:
    assert (Dense().spec, LowRank(48).spec) == ("dense", "low-rank:48")
    assert set(representations()) >= {"dense", "low-rank"}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("sparsest:3", "Unknown representation 'sparsest:3': this moetool knows dense, int8, low-rank"),
        ("", "Unknown representation ''"),
        ("dense:1", "'dense' takes no arguments"),
        ("low-rank", "takes one argument, its rank"),
        ("low-rank:", "takes one argument, its rank"),
        ("low-rank:-1", "takes one argument, its rank"),
        ("low-rank:x", "takes one argument, its rank"),
        ("low-rank:1:2", "takes one argument, its rank"),
    ],
)
def test_bad_specs(spec: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        parse_representation(spec)


def test_stored_numbers() -> None:
    assert Dense().parameters(SHAPE) == 35
    assert LowRank(3).parameters(SHAPE) == 3 * (7 + 5)
    assert LowRank(0).parameters(SHAPE) == 0


def test_only_differences_need_a_base() -> None:
    assert LowRank(2).uses_base
    assert not Dense().uses_base


@pytest.mark.parametrize("rank", [1, 3, 5, 9])
def test_low_rank_forward_is_the_product(rank: int) -> None:
    weight = filled(LowRank(rank))
    expected = inputs() @ (weight.u @ weight.v).T
    torch.testing.assert_close(weight(inputs()), expected, rtol=1e-13, atol=1e-13)


def test_dense_forward_is_the_product() -> None:
    weight = filled(Dense())
    torch.testing.assert_close(weight(inputs()), inputs() @ weight.matrix.T, rtol=1e-14, atol=1e-14)


def test_dense_of_bf16_factors_is_multiplied_in_fp32() -> None:
    weight = filled(LowRank(3), dtype=torch.bfloat16)
    assert weight.dense().dtype == torch.float32
    exact = (weight.u.double() @ weight.v.double()).float()
    torch.testing.assert_close(weight.dense(), exact, rtol=1e-6, atol=1e-6)


def test_rank_0_is_nothing_at_all() -> None:
    weight = filled(LowRank(0))
    assert not list(weight.parameters())
    assert weight.dense().equal(torch.zeros(SHAPE))
    result = weight(inputs())
    assert result.equal(torch.zeros(4, 7, dtype=torch.float64))


@pytest.mark.parametrize("representation", [Dense(), LowRank(0), LowRank(2)])
def test_no_tokens(representation: Representation) -> None:
    assert filled(representation)(inputs(0)).shape == (0, 7)


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (4096, 14336), (1, 9), (2, 2)])
def test_break_even_rank_is_the_last_that_is_smaller(shape: tuple[int, int]) -> None:
    rank = break_even_rank(shape)
    assert LowRank(rank).parameters(shape) < Dense().parameters(shape) <= LowRank(rank + 1).parameters(shape)


def test_break_even_at_equality_is_dense() -> None:
    """12 · 6 = 4 · (12 + 6): rank 4 costs exactly as much as the matrix, so it does not count as smaller."""
    assert break_even_rank((12, 6)) == 3
