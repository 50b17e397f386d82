"""A shared expert on the base of the routed ones runs on kernels, as they do, and follows its tensors and theirs."""

import copy
from typing import Any

import pytest
import torch
from stored_experts import distance, model_of

from moetool.compiled.compiler import problem
from moetool.runtime.modules.shared_expert import SharedExpertOnBase

pytestmark = pytest.mark.skipif(bool(problem()), reason=problem())


def all_shared_in(model: Any) -> list[SharedExpertOnBase]:
    return [module for module in model.modules() if isinstance(module, SharedExpertOnBase)]


def shared_in(model: Any) -> SharedExpertOnBase:
    return all_shared_in(model)[0]


def assert_on_kernels(shared: SharedExpertOnBase, tokens: int, tolerance: float = 1e-5) -> None:
    """What it makes of tokens is what plain torch makes of them in fp32."""
    hidden = torch.randn(1, tokens, shared.experts.hidden_dim, generator=torch.Generator().manual_seed(tokens))
    wide = copy.deepcopy(shared).float()
    wide.experts.float()
    with torch.no_grad():
        found = shared(hidden.to(shared.experts.down_proj.dtype))
        expected = wide.experts.shared_expert(hidden, wide._biases())
    assert (shared._kernels._made is not None) is (tokens <= 4 or not shared._is_cheap())
    assert found.shape == hidden.shape
    assert found.dtype == shared.experts.down_proj.dtype
    assert distance(found, expected) < tolerance


@pytest.mark.parametrize("tokens", [1, 8, 40])
@pytest.mark.parametrize("kind", ["shared-expert-on-base", "mixture-on-base-with-biases"])
def test_few_and_many_tokens(kind: str, tokens: int) -> None:
    """Plain factors only as long as that is faster."""
    found = all_shared_in(model_of(kind))
    assert not all(shared._is_cheap() for shared in found)
    for shared in found:
        assert_on_kernels(shared, tokens)


def test_it_is_rounded_as_little_as_others() -> None:
    assert_on_kernels(shared_in(model_of("shared-expert-on-base").bfloat16()), 3, 1e-2)


@pytest.mark.parametrize("changed", ["delta", "base"])
def test_it_follows_tensors_that_are_replaced(changed: str) -> None:
    shared = shared_in(model_of("shared-expert-on-base"))
    assert_on_kernels(shared, 2)
    experts = shared.experts
    held = next(experts.moetool[str(experts.num_experts)].parameters()) if changed == "delta" else experts.down_proj
    held.data = held.data * 2
    assert_on_kernels(shared, 2)


def test_copies_have_kernels_of_their_own() -> None:
    model = model_of("shared-expert-on-base")
    with torch.no_grad():
        shared_in(model)(torch.randn(1, 1, shared_in(model).experts.hidden_dim))
    other = shared_in(copy.deepcopy(model))
    with torch.no_grad():
        other.experts.down_proj.mul_(3)
    assert_on_kernels(other, 1)


def test_gradients_reach_its_delta() -> None:
    shared = shared_in(model_of("shared-expert-on-base"))
    shared(torch.randn(1, 3, shared.experts.hidden_dim)).sum().backward()
    own = shared.experts.moetool[str(shared.experts.num_experts)]
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in own.parameters())
