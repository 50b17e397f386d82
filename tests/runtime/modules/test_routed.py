"""Experts in plain tensors: all the ways to run them give the same."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.architectures import MoEShape
from moetool.compiled.compiler import problem
from moetool.format.kinds.pesc import PescSpec
from moetool.runtime.modules.moe import FusedExperts
from moetool.runtime.modules.pesc import Adapters
from moetool.runtime.modules.routed import RoutedExperts

EXPERTS, TOP_K, HIDDEN = 5, 2, 40
KINDS = ["gated", "gated with biases", "ungated", "ungated with biases", "adapters"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str, dtype: torch.dtype = torch.float32) -> RoutedExperts:
    torch.manual_seed(0)
    if kind == "adapters":
        spec = PescSpec(experts=EXPERTS, top_k=TOP_K, layers=(0,), width=24, scale=1.5, dropout=0.0)
        experts: RoutedExperts = Adapters(HIDDEN, spec)
    else:
        roles: Any = ("up", "down") if kind.startswith("un") else ("gate", "up", "down")
        shape = MoEShape(EXPERTS, TOP_K, HIDDEN, 24, roles, roles if "biases" in kind else ())
        experts = FusedExperts(SimpleNamespace(shape=shape, act_fn=F.silu))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_().div_(parameter.shape[-1] ** 0.5)
    return experts.to(dtype).eval()


def routing(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, chosen = torch.randn(tokens, HIDDEN), torch.rand(tokens, EXPERTS).argsort(1)[:, :TOP_K]
    return rows, chosen, torch.rand(tokens, TOP_K)


def close(found: Tensor, expected: Tensor, relative: float = 1e-5) -> bool:
    return bool((found.double() - expected.double()).norm() <= relative * expected.double().norm())


@every_kind
@pytest.mark.parametrize("tokens", [0, 1, 3, 50])
def test_every_way_gives_the_same(kind: str, tokens: int) -> None:
    experts, (rows, chosen, weights) = build(kind), routing(tokens)
    expected = experts(rows, chosen, weights).detach()  # one after the other: gradients are on
    assert expected.shape == (tokens, HIDDEN)
    with torch.no_grad():
        assert close(experts(rows, chosen, weights), expected)
        assert (experts._kernels.of(experts) is None) == bool(problem())
        scale = 1.5 if kind == "adapters" else 1.0
        assert close(experts.gathered(rows, chosen, scale * weights), expected)
    with torch.inference_mode():
        assert close(build(kind)(rows, chosen, weights), expected)


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_near(kind: str, dtype: torch.dtype) -> None:
    rows, chosen, weights = routing(4)
    with torch.no_grad():
        found = build(kind, dtype)(rows.to(dtype), chosen, weights.to(dtype))
        assert found.dtype == dtype
        assert close(found, build(kind)(rows, chosen, weights), 0.02)


@every_kind
@torch.no_grad()
def test_weights_can_be_changed_and_copied_after_use(kind: str) -> None:
    experts, given = build(kind), routing(2)

    def check(changed: RoutedExperts) -> None:
        with torch.enable_grad():
            expected = changed(*given).detach()
        assert close(changed(*given), expected)

    check(experts)
    for parameter in experts.parameters():
        parameter.mul_(-1.5)
    check(experts)
    copied, unpickled = copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))
    experts.load_state_dict({name: 2 * own for name, own in experts.state_dict().items()}, assign=True)
    for other in (experts, copied, unpickled):
        check(other)
    assert len({experts._number, copied._number, unpickled._number}) == 3
    check(experts.double().float())
