"""`SharedBaseExperts` without gates and with biases, against one dense matrix per expert, one token at a time."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import normal64
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures import MoEShape, Role
from moetool.format.layout import LayerLayout
from moetool.representations.base import Representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank
from moetool.representations.sparse import Sparse
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.moe import FusedExperts
from moetool.runtime.modules.shared_expert import SharedExpertOnBase
from moetool.runtime.synthesis import dense_experts

E, K, HIDDEN, WIDTH = 4, 2, 10, 14
KINDS: list[tuple[tuple[Role, ...], tuple[Role, ...]]] = [
    (("up", "down"), ()),
    (("up", "down"), ("up", "down")),
    (("gate", "up", "down"), ("gate", "up", "down")),
]
FORMS = {
    "low-rank": lambda expert, role: LowRank(3),
    "sparse": lambda expert, role: Sparse.derived(0.8, 7, 0, expert, role),
    "dense": lambda expert, role: Dense(),
    "mixed": lambda expert, role: Dense() if expert == 1 else LowRank(expert),
}


def built(
    kind: tuple[tuple[Role, ...], tuple[Role, ...]],
    form: Any,
    *,
    channels: int = WIDTH,
    native: Sequence[Role] = (),
    extended: bool = False,
) -> SharedBaseExperts:
    """The module with random numbers everywhere, in fp64."""
    shape = MoEShape(E, K, HIDDEN, WIDTH, *kind)
    fused = FusedExperts(SimpleNamespace(shape=shape, act_fn=nn.SiLU())).double()
    weights: dict[Role, tuple[Representation, ...] | None] = {
        role: None if role in native else tuple(form(expert, role) for expert in range(E + extended))
        for role in shape.roles
    }
    module = SharedBaseExperts(fused, LayerLayout(shape, weights, channels))
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            if parameter.is_floating_point():
                parameter.copy_(normal64(*parameter.shape, seed=seed) / 3)
        if channels < WIDTH:
            module.base_channels.copy_(torch.arange(channels) + 2)  # type: ignore[operator]
    return module


def expected(module: SharedBaseExperts, expert: int, row: Tensor, biases: dict[Role, Tensor]) -> Tensor:
    """One expert on one token."""
    shape = module.layout.shape

    def apply(role: Role, values: Tensor) -> Tensor:
        return module.dense(expert, role).double() @ values + biases.get(role, torch.zeros(1).double())

    activation = F.silu(apply(shape.roles[0], row))
    return apply("down", activation * apply("up", row) if "gate" in shape.roles else activation)


@pytest.mark.parametrize("kind", KINDS, ids=["ungated", "ungated-biased", "gated-biased"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"channels": 9}, {"native": ("down",)}, {"native": "entering"}])
def test_token_by_token(kind: Any, form: str, options: dict[str, Any]) -> None:
    if options.get("native") == "entering":
        options = {"native": kind[0][:-1]}
    module = built(kind, FORMS[form], **options)
    hidden, weights = normal64(11, HIDDEN, seed=50), normal64(11, K, seed=51).softmax(-1)
    chosen = normal64(11, E, seed=52).topk(K).indices
    found = module(hidden, chosen, weights)
    for token in range(11):
        rows = [
            weight * expected(module, expert, hidden[token], module._biases(expert))
            for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True)
        ]
        torch.testing.assert_close(found[token], sum(rows), rtol=1e-6, atol=1e-6)  # dense() is in fp32
    dense = dense_experts(module)
    torch.testing.assert_close(dense(hidden, chosen, weights), found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=["ungated", "ungated-biased", "gated-biased"])
def test_gradients_are_those_of_dense_experts(kind: Any) -> None:
    """Of the biases, and of the base as the sum over experts."""
    module = built(kind, FORMS["low-rank"]).train()
    dense: Any = dense_experts(module).double().train()
    hidden, weights = normal64(11, HIDDEN, seed=50), normal64(11, K, seed=51).softmax(-1)
    chosen = normal64(11, E, seed=52).topk(K).indices
    for run in (module, dense):
        run(hidden, chosen, weights).square().sum().backward()
    first = "gate_up_proj" if "gate" in kind[0] else "up_proj"
    for name in (first, "down_proj"):
        whole = module.get_parameter(name).grad
        torch.testing.assert_close(whole, dense.get_parameter(name).grad.sum(0, keepdim=True), rtol=1e-5, atol=1e-5)
        if kind[1]:
            own, theirs = (run.get_parameter(f"{name}_bias").grad for run in (module, dense))
            torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=["ungated", "ungated-biased", "gated-biased"])
def test_a_shared_expert_on_the_base_has_its_own_biases(kind: Any) -> None:
    roles, biases = kind
    module = built(kind, FORMS["low-rank"], extended=True)
    native = nn.Module()
    for role in roles:
        sizes = (WIDTH, HIDDEN) if role == "down" else (HIDDEN, WIDTH)
        native.add_module(f"my_{role}", nn.Linear(*sizes, bias=bool(biases)).double())
    names: dict[Role, str] = {role: f"my_{role}.weight" for role in roles}
    shared = SharedExpertOnBase(module, native, names)
    assert {name for name, _ in shared.named_parameters()} == {f"my_{role}.bias" for role in biases}
    own: dict[Role, Tensor] = {role: native.get_parameter(f"my_{role}.bias") for role in biases}
    row = normal64(1, HIDDEN, seed=60)
    torch.testing.assert_close(shared(row)[0], expected(module, E, row[0], own), rtol=1e-6, atol=1e-6)


def test_a_shared_expert_on_the_base_keeps_its_dropout() -> None:
    module = built(KINDS[0], FORMS["low-rank"], extended=True)
    native = nn.Module()
    native.residual_dropout = 0.5  # type: ignore[assignment]
    shared, rows = SharedExpertOnBase(module, native, {}), normal64(200, HIDDEN, seed=60)
    dropped = shared.train()(rows) == 0
    assert 0.45 < dropped.double().mean() < 0.55
    assert not (shared.eval()(rows) == 0).any()
    torch.testing.assert_close(shared.train()(rows).mean(), shared.eval()(rows).mean(), rtol=0.3, atol=0.3)
