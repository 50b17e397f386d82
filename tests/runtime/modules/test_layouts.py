"""transformers' own experts that lie in memory in other ways than most, and what stands in for them."""

from typing import Any

import families
import pytest
import torch
from derived_families import DERIVED
from torch import Tensor, nn

from moetool.architectures.fused_layout import FusedLayout, layout_of
from moetool.architectures.shape import IDENTITIES, ROLES, MoEShape, Role, fused_name
from moetool.calibration.held_experts import HeldExperts, RoutedBatch
from moetool.format.families import architecture_of
from moetool.format.layout import LayerLayout
from moetool.kernels.products import problem
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.fused import fused_matrix, given_back, gives_back, run_experts
from moetool.runtime.synthesis import dense_experts

TOKENS = 40
FAMILIES = ("aria_text", "gpt_oss", "llama4_text", "longcat_flash", "nemotron_h")


@pytest.fixture(scope="module", params=FAMILIES)
def native(request: pytest.FixtureRequest) -> tuple[Any, MoEShape]:
    """Experts of one layer of a family, and their shape."""
    model = families.build(request.param, **DERIVED.get(request.param, {}))
    architecture = architecture_of(model.config.to_dict())
    layer = model.get_submodule(architecture.layer_path(architecture.moe_layers[0]))
    return layer.get_submodule(architecture.experts_module), architecture.shape


def routed(experts: Any, shape: MoEShape) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, shape.hidden, generator=generator)
    count = shape.experts + getattr(experts, IDENTITIES, 0)
    weights, chosen = torch.rand(TOKENS, count, generator=generator).topk(shape.top_k)
    return hidden, chosen, weights


def standing_in(experts: Any, shape: MoEShape, native: tuple[Role, ...]) -> SharedBaseExperts:
    """Experts of which all but some roles are stored otherwise: every second one as factors of the difference to the
    first, the others as they are."""
    forms = [LowRank(min(shape.hidden, shape.intermediate)), Dense()] * shape.experts
    weights = {role: None if role in native else tuple(forms[: shape.experts]) for role in shape.roles}
    module = SharedBaseExperts(experts, LayerLayout(shape, weights, shape.intermediate))
    state = {name: own for name, own in experts.state_dict().items() if name.endswith("_bias")}
    for roles in shape.groups:
        if roles[0] in native:
            state[fused_name(roles)] = experts.state_dict()[fused_name(roles)]
            continue
        matrices = [[fused_matrix(shape, experts, expert, role) for role in roles] for expert in range(shape.experts)]
        state[fused_name(roles)] = torch.cat(matrices[0])[None]
        for expert, own in enumerate(matrices):
            for role, matrix, base in zip(roles, own, matrices[0], strict=True):
                left, values, right = torch.linalg.svd(matrix - base, full_matrices=False)
                parts = {"matrix": matrix} if expert % 2 else {"u": left * values, "v": right}
                state |= {f"moetool.{expert}.{role}.{name}": part for name, part in parts.items()}
    module.load_state_dict(state)
    return module


def others(experts: Any, shape: MoEShape, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What experts without matrices add."""
    return given_back(hidden, chosen, weights, shape.experts) if gives_back(experts) else torch.zeros_like(hidden)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("kept", [(), ("down",), ROLES[:-1]], ids=["none", "down", "entering"])
def test_experts_on_a_base_give_what_the_original_gives(native: Any, kept: tuple[Role, ...]) -> None:
    experts, shape = native
    module, given = standing_in(experts, shape, kept), routed(experts, shape)
    close(module(*given), run_experts(experts, *given))  # as in training
    with torch.no_grad():
        expected = run_experts(experts, *given)
        close(module(*given), expected)
        close(module(*(own[:1] for own in given)), expected[:1])
        expected = expected - others(experts, shape, *given)
        close(module.eager(*given), expected)
        if not kept and not problem(torch.device("cpu")):
            kernels = module.on_kernels()
            close(kernels.forward(*given), expected)
            close(kernels.forward(*(own[:1] for own in given)), expected[:1])
        for name, own in dense_experts(module).state_dict().items():
            close(own, experts.state_dict()[name])


def test_held_experts_run_as_the_original(native: Any) -> None:
    experts, shape = native
    hidden, chosen, weights = routed(experts, shape)
    held, batch = HeldExperts.of_layer(experts), RoutedBatch(chosen, weights, shape.experts)
    result = torch.zeros_like(hidden)
    with torch.no_grad():
        for expert in range(shape.experts):
            pairs, rows = batch.of(expert)
            work = held.run(expert, hidden[rows])
            result.index_add_(0, rows, work.output * batch.weights[pairs])
            parts = [hidden[rows] @ held.matrix(shape, expert, role).T for role in shape.entering]
            close(work.gate_up, torch.cat(parts, -1))
        result += others(experts, shape, hidden, chosen, weights)
        close(result, run_experts(experts, hidden, chosen, weights))
    assert held.intermediate == shape.intermediate


def test_a_block_that_weighs_inputs_calls_them_as_its_own() -> None:
    model = families.build("llama4_text", **DERIVED["llama4_text"])
    block = model.model.layers[1].feed_forward
    hidden = torch.randn(2, 9, 32, requires_grad=True)
    shape = MoEShape(6, 1, 32, 24)
    expected = block(hidden)[0]
    [gradient] = torch.autograd.grad(expected.square().sum(), hidden)
    block.experts = standing_in(block.experts, shape, ())
    found = block(hidden)[0]
    close(found, expected)
    close(torch.autograd.grad(found.square().sum(), hidden)[0], gradient)
    with torch.no_grad():
        close(block(hidden)[0], expected)


LAYOUTS = [FusedLayout(*flags) for flags in ((False, False), (True, False), (False, True), (True, True))]


@pytest.mark.parametrize("lies", LAYOUTS, ids=str)
def test_matrices_lie_where_they_are_found(lies: FusedLayout) -> None:
    matrices = [torch.randn(3, 5, 4) for _ in range(2)]
    fused = lies.fused(matrices)
    assert fused.shape == (3, *lies.shape(10, 4))
    assert all(own.equal(matrix) for own, matrix in zip(lies.matrices(fused, 2), matrices, strict=True))
    lying = torch.randn(7, 10)
    assert lies.joined(lies.parts(lying, 2)).equal(lying)
    assert torch.cat(lies.parts(lying, 2), -1).equal(lies.canonical(lying, 2))
    assert lies.as_lying(lies.canonical(lying, 2), 2).equal(lying)
    assert layout_of(nn.Module()) == FusedLayout()
