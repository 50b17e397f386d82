"""The product with a sparse matrix: both of its ways against the dense matrix, and what it keeps for the backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draws import normal64
from torch import Tensor

from moetool.numerics import sparse_product
from moetool.numerics.sparse_product import sparse_linear

SHAPE = (30, 40)
COUNTS = (1, 7, 12, 13, 300, 1200)  # gathered up to 12


def places(count: int, shape: tuple[int, int] = SHAPE) -> Tensor:
    order = torch.randperm(shape[0] * shape[1], generator=torch.Generator().manual_seed(1))
    return order[:count].sort().values.int()


def plain(inputs: Tensor, values: Tensor, indices: Tensor, shape: tuple[int, int]) -> Tensor:
    matrix = values.new_zeros(shape[0] * shape[1]).index_copy(0, indices.long(), values)
    return inputs @ matrix.view(shape).T


def gradients(product: Callable[..., Tensor], *inputs: Any) -> tuple[Tensor, ...]:
    tokens, values = (tensor.detach().requires_grad_() for tensor in inputs[:2])
    output = product(tokens, values, *inputs[2:])
    return (output, *torch.autograd.grad((output * normal64(*output.shape, seed=9)).sum(), (tokens, values)))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("block", [1, 50, 1 << 22])
def test_it_is_the_dense_product(count: int, tokens: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_product, "_BLOCK", block)
    arguments = normal64(tokens, SHAPE[1]), normal64(count, seed=1), places(count), SHAPE
    for found, expected in zip(gradients(sparse_linear, *arguments), gradients(plain, *arguments), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("count", [7, 300])
def test_gradients_by_finite_differences(count: int) -> None:
    inputs, values = normal64(3, SHAPE[1]).requires_grad_(), normal64(count, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, v: sparse_linear(x, v, places(count), SHAPE), (inputs, values))


@pytest.mark.parametrize("count", [7, 300])
@pytest.mark.parametrize("frozen", ["inputs", "values"])
def test_only_what_is_asked_for_gets_a_gradient(count: int, frozen: str) -> None:
    inputs = normal64(3, SHAPE[1]).requires_grad_(frozen != "inputs")
    values = normal64(count, seed=1).requires_grad_(frozen != "values")
    sparse_linear(inputs, values, places(count), SHAPE).sum().backward()
    assert (inputs.grad is None) == (frozen == "inputs")
    assert (values.grad is None) == (frozen == "values")


@pytest.mark.parametrize("count", [7, 300])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(count: int, autocast: bool) -> None:
    """Gradients have the dtype of what they are of; under autocast fp32 values stay fp32."""
    own = torch.float32 if autocast else torch.bfloat16
    inputs, values = normal64(17, SHAPE[1]).to(own).requires_grad_(), normal64(count, seed=1).to(own).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = sparse_linear(inputs, values, places(count), SHAPE)
    assert output.dtype == torch.bfloat16
    found = output, *torch.autograd.grad((output.double() * normal64(17, SHAPE[0], seed=9)).sum(), (inputs, values))
    assert found[1].dtype == found[2].dtype == own
    exact = gradients(plain, inputs.double(), values.double(), places(count), SHAPE)
    for mine, theirs in zip(found, exact, strict=True):
        assert (mine.double() - theirs).norm() < 2 * torch.finfo(torch.bfloat16).eps * theirs.norm()


@pytest.mark.parametrize("count", [7, 300])
def test_only_the_arguments_are_kept(count: int) -> None:
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    arguments = normal64(3, SHAPE[1]).requires_grad_(), normal64(count, seed=1).requires_grad_(), places(count)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        sparse_linear(*arguments, SHAPE)
    assert sorted(kept) == sorted(tensor.numel() for tensor in arguments)
