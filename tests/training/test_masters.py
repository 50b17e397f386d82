"""What a repair takes its steps on."""

import pytest
import torch
from torch import nn

from moetool.training.masters import BlockFactors, LowRankUpdate, NumbersMaster


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

    weight = (matrices.mT if is_transposed else matrices).contiguous()
    master = BlockFactors(weight, 8, weight.device, is_transposed=is_transposed)
    master.set(factors)
    made = master.made(weight)
    assert made.is_contiguous()
    loss(made.mT if is_transposed else made).backward()
    torch.testing.assert_close(master.numbers.grad, wanted.grad, check_dtype=False, rtol=1e-5, atol=1e-6)


def test_factors_are_those_of_the_matrix_as_it_was(stream: torch.Generator) -> None:
    matrix = torch.randn(4, 16, generator=stream)
    master = BlockFactors(matrix, 8, matrix.device)
    assert master.made(matrix).equal(matrix)
    for _ in range(3):
        master.set(1 + 0.2 * torch.rand(4, 2, generator=stream))
    torch.testing.assert_close(master.made(matrix), matrix * master.values.repeat_interleave(8, -1))
    master.numbers.data.fill_(-1.0)
    master.give()
    assert bool((master.values > 0).all()), "no scale changes its sign"


@pytest.mark.parametrize("shape", [(48, 20), (3, 48, 20)])
def test_what_is_added_is_of_low_rank_and_stored_as_the_matrix_is(
    shape: tuple[int, ...], stream: torch.Generator
) -> None:
    weight = (0.02 * torch.randn(shape, generator=stream)).bfloat16().float()
    master = LowRankUpdate.of(weight, 4, torch.bfloat16, stream)
    assert master.numbers.shape == (*shape[:-2], 4, 68)
    assert master.made(weight).equal(weight), "nothing is added at first"
    master.numbers.data[..., 20:] = torch.randn(*shape[:-2], 4, 48, generator=stream)
    made = master.made(weight)
    assert made.equal(made.bfloat16().float())
    exact = LowRankUpdate.of(weight + 1e-5, 4, torch.bfloat16, stream)  # numbers that 16 bits do not hold stay in 32
    exact.set(master.values)
    added = (exact.made(weight) - weight).double()
    assert torch.linalg.matrix_rank(added, rtol=1e-5).max() == 4
    torch.testing.assert_close(made, weight + added.float(), rtol=1e-2, atol=1e-3)


def test_gradients_pass_through_rounding(stream: torch.Generator) -> None:
    weight = torch.randn(24, 20, generator=stream).bfloat16().float()
    grads = []
    for stored in (torch.bfloat16, torch.float32):
        master = LowRankUpdate.of(weight, 4, stored, torch.Generator().manual_seed(1))
        (master.made(weight) * torch.arange(20.0)).sum().backward()
        grads.append(master.numbers.grad)
    assert grads[0].equal(grads[1])
    assert bool(grads[0].any())


def test_numbers_are_given_as_they_would_be_stored(stream: torch.Generator) -> None:
    parameter = nn.Parameter(torch.randn(8, generator=stream).bfloat16().float())
    master = NumbersMaster(parameter, torch.bfloat16)
    master.numbers.data.add_(0.001)
    master.give()
    assert parameter.equal(parameter.bfloat16().float())
