"""The product of one token with a matrix in bf16 is what fp64 gives, rounded, at any size."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from moetool.compiled.compiler import problem
from moetool.kernels import vector
from moetool.kernels.vector import linear, takes

pytestmark = pytest.mark.skipif(bool(problem()), reason=problem())
ROWS, COLUMNS = (1, 15, 33, 300), (1, 17, 48, 64, 197, 512)


def given(rows: int, columns: int, *before: int) -> tuple[Tensor, nn.Parameter, Tensor]:
    """Input, matrix and bias."""
    generator = torch.Generator().manual_seed(rows + columns)
    shapes = ((*before, columns), (rows, columns), (rows,))
    x, matrix, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return x, nn.Parameter(matrix, requires_grad=False), bias


@torch.no_grad()
def test_as_in_fp64(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "_kernel", vector._kernel.__wrapped__)  # the library is another one here
    for rows, columns in itertools.product(ROWS, COLUMNS):
        x, matrix, bias = given(rows, columns, 1, 1)
        assert takes(x, matrix)
        exact = x.double() @ matrix.double().T
        for added in (None, bias):
            found, right = linear(x, matrix, added), exact if added is None else exact + added.double()
            assert found.shape == (1, 1, rows)
            assert found.dtype == torch.bfloat16
            # Half a step of bf16, and what fp32 loses of terms that cancel.
            slack = 1e-5 * (x.double().abs() @ matrix.double().abs().T)
            assert bool(((found.double() - right).abs() <= right.abs() / 256 + slack).all())


@torch.no_grad()
def test_what_is_not_finite_stays_so() -> None:
    x, matrix, _ = given(40, 70, 1)
    for number in (torch.inf, torch.nan):
        x[0, 3] = number
        assert not linear(x, matrix, None).isfinite().any()


@torch.no_grad()
def test_any_number_of_threads_gives_the_same_bits(request: pytest.FixtureRequest) -> None:
    x, matrix, bias = given(700, 512, 1)
    alone = linear(x, matrix, bias)
    request.getfixturevalue("two_threads")
    assert all(linear(x, matrix, bias).equal(alone) for _ in range(20))


@torch.no_grad()
def test_what_is_left_to_torch() -> None:
    x, matrix, _ = given(33, 64, 1)
    assert takes(x, matrix)
    assert not takes(x.expand(2, 64), matrix)
    assert not takes(x.half(), nn.Parameter(matrix.half(), requires_grad=False))
    assert not takes(x, nn.Parameter(matrix.t().contiguous().t(), requires_grad=False))
    assert not takes(x, matrix.float())  # a passing tensor, as parametrizations make
    with torch.autocast("cpu"):
        assert not takes(x, matrix)
    with torch.enable_grad():
        assert not takes(x, matrix)
