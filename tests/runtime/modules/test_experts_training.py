"""Training experts that share a base: gradients of the materialised model, and memory that does not grow with them."""

from typing import Any

import pytest
import torch
from draws import normal64
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from moetool.architectures import ROLES, MoEShape
from moetool.format.layout import LayerLayout
from moetool.representations.base import Representation
from moetool.representations.low_rank import LowRank
from moetool.representations.sparse import MagnitudeSparse, Sparse
from moetool.runtime.modules.experts import SharedBaseExperts

E, K, HIDDEN, INTERMEDIATE, TOKENS = 6, 2, 24, 40, 50
SHAPE = MoEShape(experts=E, top_k=K, hidden=HIDDEN, intermediate=INTERMEDIATE)
FORMS = ["rare", "sparse", "largest", "low-rank"]


def form(name: str, seed: int) -> Representation:
    return {
        "rare": Sparse(0.995, seed),
        "sparse": Sparse(0.9, seed),
        "largest": MagnitudeSparse(0.1),
        "low-rank": LowRank(2),
    }[name]


def experts(name: str, dtype: torch.dtype = torch.float64) -> SharedBaseExperts:
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=E, num_experts_per_tok=K, vocab_size=8
    )
    forms = {role: tuple(form(name, 10 * e + i) for e in range(E)) for i, role in enumerate(ROLES)}
    module = SharedBaseExperts(MixtralExperts(config).double(), LayerLayout(SHAPE, forms, INTERMEDIATE))
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(normal64(*parameter.shape, seed=seed) / parameter.shape[-1] ** 0.5)
        for expert, role, representation in module.layout.deltas():
            if isinstance(representation, MagnitudeSparse):
                matrix = normal64(*SHAPE.matrix(role), seed=100 * expert + len(role))
                module.delta(expert, role).load_state_dict(representation.encode(matrix, torch.float64))
    return module.to(dtype)


def batch(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    weights, index = normal64(tokens, E, seed=6).softmax(-1).topk(K)
    return normal64(tokens, HIDDEN, seed=5), index, weights


def materialised(module: SharedBaseExperts) -> list[dict[str, Tensor]]:
    """Every expert's own three matrices, as leaves."""
    base = {"down": module.down_proj[0], **dict(zip(("gate", "up"), module.gate_up_proj[0].chunk(2), strict=True))}
    return [
        {role: (base[role] + delta_matrix(module, e, role)).detach().requires_grad_() for role in ROLES}
        for e in range(E)
    ]


def delta_matrix(module: SharedBaseExperts, expert: int, role: Any) -> Tensor:
    """In fp64, from the parameters alone."""
    delta = module.delta(expert, role)
    if hasattr(delta, "values"):
        flat = torch.zeros(SHAPE.matrix(role), dtype=torch.float64).view(-1)
        return flat.index_copy(0, delta.indices().long(), delta.values.double()).view(SHAPE.matrix(role))
    return delta.u.double() @ delta.v.double()


def run_materialised(matrices: list[dict[str, Tensor]], hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    output = torch.zeros_like(hidden)
    for expert, own in enumerate(matrices):
        rows, place = (index == expert).nonzero(as_tuple=True)
        x = hidden[rows]
        y = F.linear(F.silu(F.linear(x, own["gate"])) * F.linear(x, own["up"]), own["down"])
        output = output.index_add(0, rows, y * weights[rows, place, None])
    return output


def backward(output: Tensor) -> None:
    (output.double() * normal64(*output.shape, seed=9)).sum().backward()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("nested", [False, True])
def test_gradients_are_those_of_a_materialised_model(name: str, nested: bool) -> None:
    """The base's is the sum over the experts', a sparse difference's the matrix's at its places, inputs' the same."""
    module = experts(name)
    mine, theirs = ([tensor.requires_grad_(tensor.is_floating_point()) for tensor in batch()] for _ in range(2))
    matrices = materialised(module)
    backward(checkpoint(module, *mine, use_reentrant=False) if nested else module(*mine))
    backward(run_materialised(matrices, *theirs))
    summed = {role: sum(own[role].grad for own in matrices) for role in ROLES}
    base = {"down": module.down_proj.grad[0]}
    base |= dict(zip(("gate", "up"), module.gate_up_proj.grad[0].chunk(2), strict=True))
    for role in ROLES:
        assert relative(base[role], summed[role]) < 1e-10
    for expert, role, _ in module.layout.deltas():
        delta, gradient = module.delta(expert, role), matrices[expert][role].grad
        if name == "low-rank":
            assert relative(delta.u.grad, gradient @ delta.v.T) < 1e-10
            assert relative(delta.v.grad, delta.u.T @ gradient) < 1e-10
        else:
            assert relative(delta.values.grad, gradient.view(-1)[delta.indices().long()]) < 1e-10
    for position in (0, 2):
        assert relative(mine[position].grad, theirs[position].grad) < 1e-10


@pytest.mark.parametrize("name", FORMS)
def test_a_step_changes_a_difference_in_its_form_only(name: str) -> None:
    module = experts(name)
    before = {(e, role): delta_matrix(module, e, role).detach() for e, role, _ in module.layout.deltas()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    backward(module(*batch()))
    optimizer.step()
    for (expert, role), old in before.items():
        new = delta_matrix(module, expert, role).detach()
        assert not new.equal(old)
        if name == "low-rank":
            assert int(torch.linalg.matrix_rank(new)) <= 2
        else:
            elsewhere = torch.ones(new.numel(), dtype=torch.bool)
            elsewhere[module.delta(expert, role).indices().long()] = False
            assert not new.view(-1)[elsewhere].any()


@pytest.mark.parametrize("name", FORMS)
def test_nothing_kept_grows_with_experts_or_matrices(name: str) -> None:
    """Of the activations only the base's are kept, once per token; of the matrices none but parameters."""
    module, inputs = experts(name), batch()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = module(inputs[0].requires_grad_(), inputs[1], inputs[2].requires_grad_())
    assert output.requires_grad
    per_token = 8 * TOKENS * (HIDDEN + INTERMEDIATE + 4 * K)
    assert sum(kept.values()) <= per_token


@pytest.mark.parametrize("name", FORMS)
def test_the_backward_holds_no_more_than_one_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recomputed for an expert keeps nothing of the size of a matrix either, tokens being few."""
    module, inputs = experts(name), batch(4)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept.append(tensor.numel())
        return tensor

    monkeypatch.setattr("moetool.runtime.modules.experts.checkpoint", lambda call, *arguments, **_: call(*arguments))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(*inputs)
    assert kept
    assert max(kept) < HIDDEN * INTERMEDIATE


@pytest.mark.parametrize("name", FORMS)
def test_autocast(name: str) -> None:
    module, exact = experts(name, torch.float32), experts(name)
    inputs = batch()
    with torch.autocast("cpu", torch.bfloat16):
        output = module(inputs[0].float(), inputs[1], inputs[2].float())
    backward(output)
    backward(exact(*inputs))
    for (parameter_name, mine), theirs in zip(module.named_parameters(), exact.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        assert relative(mine.grad.double(), theirs.grad) < 0.05, parameter_name
