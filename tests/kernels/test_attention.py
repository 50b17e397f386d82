"""Attention of single tokens by kernels gives what torch's gives in fp64, in any layout of the cache."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.compiled.compiler import problem
from moetool.kernels.attention import attend, attends

pytestmark = pytest.mark.skipif(bool(problem()), reason=problem())
HEADS = [(4, 4), (6, 2), (7, 1), (10, 2)]  # of queries, and of keys
WIDTHS = [(16, 16), (48, 80), (64, 128)]  # of keys, and of values
LENGTHS = (1, 15, 16, 70)
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def states(heads: tuple[int, int], widths: tuple[int, int], length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values of two sequences; the cache has room for more tokens, as a static one."""
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(2, heads[0], 1, widths[0], generator=generator)
    key, value = (torch.randn(2, heads[1], length + 3, width, generator=generator) for width in widths)
    return query.to(dtype), key.to(dtype)[:, :, :length], value.to(dtype)[:, :, :length]


def expected(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    query, key, value = query.double(), key.double(), value.double()
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True).squeeze(2)


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_as_torch_in_fp64(heads: tuple[int, int], dtype: torch.dtype, instructions: str) -> None:
    for widths, length in itertools.product(WIDTHS, LENGTHS):
        given = states(heads, widths, length, dtype)
        assert attends(*given, None)
        assert error(attend(*given, None, 0.3), expected(*given, None, 0.3)) < BOUNDS[dtype]


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_masks(dtype: torch.dtype, sequences: int) -> None:
    given = states((6, 2), (32, 32), 40, torch.bfloat16)
    shown = torch.rand(sequences, 1, 1, 40, generator=torch.Generator().manual_seed(0)) < 0.6
    mask = shown if dtype == torch.bool else torch.where(shown, 0.5, torch.finfo(dtype).min).to(dtype)
    assert attends(*given, mask)
    assert error(attend(*given, mask, 1.0), expected(*given, mask, 1.0)) < BOUNDS[torch.bfloat16]


def test_nothing_to_attend_to_is_zero() -> None:
    given = states((6, 2), (32, 32), 40, torch.bfloat16)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[1] = False
    found = attend(*given, mask, 1.0)
    assert found[0].all()
    assert not found[1].any()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_heads(number: float) -> None:
    query, key, value = states((6, 2), (32, 32), 40, torch.bfloat16)
    clean = attend(query, key, value, None, 1.0)
    key = key.clone()
    key[1, 0, 7, 3] = number
    found = attend(query, key, value, None, 1.0)
    assert found[1, :3].isnan().any()
    assert found[0].equal(clean[0])
    assert found[1, 3:].equal(clean[1, 3:])


def test_large_scores_do_not_overflow() -> None:
    query, key, value = states((4, 4), (16, 16), 70, torch.bfloat16)
    found, right = (run(query * 1e4, key, value, None, 1.0) for run in (attend, expected))
    assert error(found, right) < BOUNDS[torch.bfloat16]


def test_any_number_of_threads_gives_the_same_bits(request: pytest.FixtureRequest) -> None:
    given = states((16, 4), (64, 64), 600, torch.bfloat16)
    alone = attend(*given, None, 0.125)
    request.getfixturevalue("two_threads")
    assert all(attend(*given, None, 0.125).equal(alone) for _ in range(20))


def test_what_is_left_to_torch() -> None:
    query, key, value = states((6, 2), (32, 32), 40, torch.bfloat16)
    assert attends(query, key, value, None)
    assert not attends(query.float(), key.float(), value.float(), None)
    assert not attends(query.expand(2, 6, 2, 32), key, value, None)
    assert not attends(query[..., :24], key[..., :24], value, None)
    assert not attends(query, key, value, torch.zeros(2, 6, 1, 40))
    assert not attends(query, key.transpose(2, 3).contiguous().transpose(2, 3), value, None)
    assert not attends(query.requires_grad_(), key, value, None)
