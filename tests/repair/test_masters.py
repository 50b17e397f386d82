"""What a repair takes its steps on."""

import pytest
import torch
from torch import nn

from moetool.repair.masters import BlockFactors, NumbersMaster


@pytest.fixture
def stream() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_factors_of_blocks_have_the_gradient_of_a_product(stream: torch.Generator, *, is_transposed: bool) -> None:
    matrices = torch.randn(3, 6, 32, generator=stream, dtype=torch.float64)
    factors = 1 + 0.1 * torch.randn(3, 6, 4, generator=stream, dtype=torch.float64)
    inputs = torch.randn(5, 32, generator=stream, dtype=torch.float64)

    def loss(weights: torch.Tensor) -> torch.Tensor:
        return (torch.einsum("ti,eoi->teo", inputs, weights).tanh() ** 3).sum()

    wanted = factors.clone().requires_grad_(True)
    loss(matrices * wanted.repeat_interleave(8, -1)).backward()

    parameter = nn.Parameter((matrices.mT if is_transposed else matrices).clone())
    master = BlockFactors(parameter, 8, is_transposed=is_transposed)
    master.set(factors)
    loss(parameter.mT if is_transposed else parameter).backward()
    master.take_gradient()
    assert parameter.grad is None
    torch.testing.assert_close(master.numbers.grad, wanted.grad, check_dtype=False, rtol=1e-5, atol=1e-6)
    master.take_gradient()
    assert not master.numbers.grad.any(), "a gradient counts once"


def test_factors_are_those_of_the_matrix_as_it_was(stream: torch.Generator) -> None:
    matrix = torch.randn(4, 16, generator=stream)
    parameter = nn.Parameter(matrix.clone())
    master = BlockFactors(parameter, 8)
    for _ in range(3):
        master.set(1 + 0.2 * torch.rand(4, 2, generator=stream))
    torch.testing.assert_close(parameter, matrix * master.values.repeat_interleave(8, -1))
    master.numbers.data.fill_(-1.0)
    master.give()
    assert bool((master.values > 0).all()), "no scale changes its sign"
    master.set(torch.ones(4, 2))
    torch.testing.assert_close(parameter, matrix)


def test_numbers_are_given_as_they_would_be_stored(stream: torch.Generator) -> None:
    parameter = nn.Parameter(torch.randn(8, generator=stream).bfloat16().float())
    master = NumbersMaster(parameter, torch.bfloat16)
    master.numbers.data.add_(0.001)
    master.give()
    assert parameter.equal(parameter.bfloat16().float())
