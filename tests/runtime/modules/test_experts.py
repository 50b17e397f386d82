"""`SharedBaseExperts` against the plain meaning of its parameters: one dense matrix per expert, one token at a time."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from draws import normal64
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from moetool.architectures import ROLES, MoEShape, Role
from moetool.format.layout import LayerLayout
from moetool.representations.base import Representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank
from moetool.runtime.modules.experts import SharedBaseExperts

E, K, D, INTERMEDIATE = 5, 2, 10, 14
SHAPE = MoEShape(experts=E, top_k=K, hidden=D, intermediate=INTERMEDIATE)
FULL = LowRank(min(D, INTERMEDIATE))
TOKENS = 23


@pytest.fixture
def native() -> Any:
    """transformers' own experts, fp64."""
    config = MixtralConfig(
        hidden_size=D, intermediate_size=INTERMEDIATE, num_local_experts=E, num_experts_per_tok=K, vocab_size=8
    )
    config._experts_implementation = "eager"
    experts = MixtralExperts(config).double()
    with torch.no_grad():
        experts.gate_up_proj.copy_(normal64(E, 2 * INTERMEDIATE, D, seed=1) / D**0.5)
        experts.down_proj.copy_(normal64(E, D, INTERMEDIATE, seed=2) / INTERMEDIATE**0.5)
    return experts


def batch(tokens: int = TOKENS, seed: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, distinct experts per token, and weights that sum to 1."""
    hidden = normal64(tokens, D, seed=seed)
    index = normal64(tokens, E, seed=seed + 1).topk(K).indices
    weights = normal64(tokens, K, seed=seed + 2).softmax(-1)
    return hidden, index, weights


def own(native: Any, expert: int, role: Role) -> Tensor:
    """One expert's matrix in the fused module."""
    if role == "down":
        return native.down_proj[expert].detach()
    gate, up = native.gate_up_proj[expert].detach().chunk(2)
    return gate if role == "gate" else up


def shared(native: Any, layout: LayerLayout, kept: Tensor | None = None) -> SharedBaseExperts:
    """The module with the mean as its base, random factors, and dense experts as in `native`."""
    module = SharedBaseExperts(native, layout)
    kept = torch.arange(layout.base_channels) if kept is None else kept
    base = {role: torch.stack([own(native, e, role) for e in range(E)]).mean(0) for role in ROLES}
    with torch.no_grad():
        if module.layout.weights["up"] is not None:
            module.gate_up_proj[0] = torch.cat([base["gate"][kept], base["up"][kept]])
        else:
            module.gate_up_proj.copy_(native.gate_up_proj)
        module.down_proj.copy_(base["down"][:, kept] if module.layout.weights["down"] is not None else native.down_proj)
        if layout.is_pruned:
            module.base_channels.copy_(kept)
        for seed, (expert, role, representation) in enumerate(layout.deltas()):
            delta = module.delta(expert, role)
            for offset, parameter in enumerate(delta.parameters()):
                size = parameter.shape
                parameter.copy_(normal64(*size, seed=1000 + 10 * seed + offset) * 0.7 / size[1] ** 0.5)
            if representation == Dense():
                delta.matrix.copy_(own(native, expert, role))
    return module


def matrices(module: SharedBaseExperts) -> list[dict[Role, Tensor]]:
    """Every expert's matrix `base + U V` in the dtype of the module, differentiable, by plain algebra."""
    layout = module.layout
    kept = module.base_channels.long() if layout.is_pruned else torch.arange(INTERMEDIATE)
    found: list[dict[Role, Tensor]] = []
    for expert in range(E):
        row: dict[Role, Tensor] = {}
        for role in ROLES:
            fused = module.down_proj if role == "down" else module.gate_up_proj
            stored = fused[0 if layout.weights[role] is not None else expert]
            if role != "down":
                stored = stored.chunk(2)[("gate", "up").index(role)]
            if layout.weights[role] is None:
                row[role] = stored
                continue
            representation = layout.weights[role][expert]
            delta = module.delta(expert, role)
            if representation == Dense():
                row[role] = delta.matrix
                continue
            full = torch.zeros(SHAPE.matrix(role), dtype=stored.dtype)
            full = full.index_copy(1 if role == "down" else 0, kept, stored)
            row[role] = full + delta.u @ delta.v if representation.rank else full
        found.append(row)
    return found


def reference(experts: list[dict[Role, Tensor]], hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """One token and one expert at a time."""
    rows = []
    for token in range(len(hidden)):
        x, y = hidden[token], torch.zeros(D, dtype=hidden.dtype)
        for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
            w = experts[expert]
            y = y + weight * (w["down"] @ (F.silu(w["gate"] @ x) * (w["up"] @ x)))
        rows.append(y)
    return torch.stack(rows) if rows else torch.zeros(0, D, dtype=hidden.dtype)


def assert_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if expected.numel():
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < tolerance, f"relative error {error:.2e}"


def layout(weights: Mapping[str, Any], base_channels: int = INTERMEDIATE, dynamic: int = 0) -> LayerLayout:
    """A layout where one representation stands for all experts."""
    spelled = {role: (w,) * E if isinstance(w, Representation) else w for role, w in weights.items()}
    return LayerLayout(SHAPE, spelled, base_channels, dynamic)


MIXED = (LowRank(1), LowRank(0), Dense(), LowRank(6), LowRank(3))
LAYOUTS = {
    "full rank": layout(dict.fromkeys(ROLES, FULL)),
    "rank 0": layout(dict.fromkeys(ROLES, LowRank(0))),
    "low rank": layout(dict.fromkeys(ROLES, LowRank(3))),
    "dense": layout(dict.fromkeys(ROLES, Dense())),
    "mixed": layout({"gate": MIXED, "up": MIXED[::-1], "down": MIXED[2:] + MIXED[:2]}),
    "native down": layout({"gate": MIXED, "up": LowRank(2), "down": None}),
    "native gate and up": layout({"gate": None, "up": None, "down": MIXED}),
    "pruned": layout(dict.fromkeys(ROLES, LowRank(3)), base_channels=9),
    "pruned, mixed": layout({"gate": MIXED, "up": MIXED[::-1], "down": MIXED}, base_channels=1),
    "pruned, native down": layout({"gate": MIXED, "up": MIXED, "down": None}, base_channels=9),
    "pruned, native gate and up": layout({"gate": None, "up": None, "down": MIXED}, base_channels=9),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
KEPT = torch.tensor([0, 2, 3, 4, 7, 8, 10, 11, 13])


def kept_of(layout: LayerLayout) -> Tensor | None:
    return KEPT[: layout.base_channels] + (layout.base_channels == 1) * 6 if layout.is_pruned else None


def test_dense_is_the_native_module(native: Any) -> None:
    module = shared(native, LAYOUTS["dense"])
    assert_equal(module(*batch()), native(*batch()))


def test_full_rank_differences_are_the_native_module(native: Any) -> None:
    """`W_j = base + Δ_j` with Δ_j = U V exactly: U = Δ, V = I, or the other way round for the wide matrix."""
    module = shared(native, LAYOUTS["full rank"])
    with torch.no_grad():
        base = {"down": module.down_proj[0], **dict(zip(("gate", "up"), module.gate_up_proj[0].chunk(2), strict=True))}
        for expert, role, _ in module.layout.deltas():
            difference, delta = own(native, expert, role) - base[role], module.delta(expert, role)
            square = torch.eye(FULL.rank, dtype=torch.float64)
            delta.u.copy_(square if role == "down" else difference)
            delta.v.copy_(difference if role == "down" else square)
    assert_equal(module(*batch()), native(*batch()))


@each_layout
def test_equal_to_the_per_expert_form(native: Any, layout: LayerLayout) -> None:
    module = shared(native, layout, kept_of(layout))
    assert_equal(module(*batch()), reference(matrices(module), *batch()))


def test_static_pruning_is_a_base_with_zeros(native: Any) -> None:
    """Rows of gate and up, columns of down; the differences keep all channels."""
    pruned = shared(native, LAYOUTS["pruned"], KEPT)
    whole = shared(native, LAYOUTS["low rank"])
    gone = torch.tensor([j for j in range(INTERMEDIATE) if j not in KEPT.tolist()])
    with torch.no_grad():
        whole.gate_up_proj[0, gone] = 0
        whole.gate_up_proj[0, INTERMEDIATE + gone] = 0
        whole.down_proj[0, :, gone] = 0
    assert_equal(pruned(*batch()), whole(*batch()))
    assert not pruned(*batch()).allclose(shared(native, LAYOUTS["low rank"])(*batch()))


@each_layout
def test_dense_matrices(native: Any, layout: LayerLayout) -> None:
    module = shared(native, layout, kept_of(layout))
    expected = matrices(module)
    for expert in range(E):
        for role in ROLES:
            found = module.dense(expert, role)
            assert not found.requires_grad
            torch.testing.assert_close(found.double(), expected[expert][role], rtol=1e-6, atol=1e-6)


def test_dense_leaves_the_parameters_alone(native: Any) -> None:
    module = shared(native, layout({"gate": MIXED, "up": MIXED, "down": MIXED}, base_channels=9), KEPT)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for expert in range(E):
        for role in ROLES:
            module.dense(expert, role)
    assert all(tensor.equal(before[name]) for name, tensor in module.state_dict().items())


DYNAMIC = {
    "whole base": layout(dict.fromkeys(ROLES, LowRank(3)), dynamic=5),
    "pruned base": layout(dict.fromkeys(ROLES, LowRank(3)), base_channels=9, dynamic=4),
    "some dense": layout({"gate": MIXED, "up": MIXED, "down": MIXED}, base_channels=9, dynamic=4),
    "only down": layout({"gate": None, "up": None, "down": MIXED}, dynamic=5),
}
each_dynamic = pytest.mark.parametrize("layout", DYNAMIC.values(), ids=DYNAMIC.keys())


@torch.no_grad()
def channel_scores(module: SharedBaseExperts, hidden: Tensor, index: Tensor, weights: Tensor) -> dict[int, float]:
    """`‖base_down[:, j]‖ · ‖h_j‖`, h the routing-weighted activations of the experts that use the down base."""
    experts, layout = matrices(module), module.layout
    summed = torch.zeros(len(hidden), INTERMEDIATE, dtype=hidden.dtype)
    for token in range(len(hidden)):
        for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
            if layout.weights["down"][expert].uses_base:
                gate, up = (experts[expert][role] @ hidden[token] for role in ("gate", "up"))
                summed[token] += weight * F.silu(gate) * up
    stored = module.base_channels.tolist() if layout.is_pruned else range(INTERMEDIATE)
    return {
        channel: float(module.down_proj[0, :, position].norm() * summed[:, channel].norm())
        for position, channel in enumerate(stored)
    }


def without_weakest(module: SharedBaseExperts, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, list[int]]:
    """The slow form of dynamic pruning: a copy of the down base with zero columns. And which columns."""
    scores = channel_scores(module, *inputs)
    weakest = sorted(scores, key=lambda channel: scores[channel])[: module.layout.dynamic_channels]
    experts = matrices(module)
    for expert, representation in enumerate(module.layout.weights["down"]):
        if representation.uses_base:
            factors = module.delta(expert, "down")
            delta = factors.u @ factors.v if representation.rank else torch.zeros(D, INTERMEDIATE, dtype=torch.float64)
            keep = torch.ones(INTERMEDIATE, dtype=torch.float64)
            keep[weakest] = 0
            experts[expert]["down"] = (experts[expert]["down"] - delta) * keep + delta
    return reference(experts, *inputs), weakest


@each_dynamic
def test_dynamic_pruning_is_its_slow_form(native: Any, layout: LayerLayout) -> None:
    module = shared(native, layout, KEPT if layout.is_pruned else None)
    expected, weakest = without_weakest(module, batch())
    assert len(weakest) == layout.dynamic_channels
    assert_equal(module(*batch()), expected)
    assert not module(*batch()).allclose(reference(matrices(module), *batch()))


@each_dynamic
def test_dynamic_pruning_is_stateless(native: Any, layout: LayerLayout) -> None:
    module = shared(native, layout, KEPT if layout.is_pruned else None)
    first, other = batch(seed=5), batch(seed=50)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    once = module(*first)
    assert without_weakest(module, first)[1] != without_weakest(module, other)[1]  # or there is nothing to forget
    module(*other)
    assert module(*first).equal(once)
    assert all(tensor.equal(before[name]) for name, tensor in module.state_dict().items())


def test_dynamic_pruning_drops_exactly_the_lowest_scores(native: Any) -> None:
    """The gradient of the output by a column of the down base is zero for what was dropped, and for nothing else."""
    module = shared(native, DYNAMIC["pruned base"], KEPT)
    scores = channel_scores(module, *batch())
    module(*batch()).square().sum().backward()
    silent = [
        channel for position, channel in enumerate(KEPT.tolist()) if not module.down_proj.grad[0, :, position].any()
    ]
    assert silent == sorted(sorted(scores, key=lambda channel: scores[channel])[:4])


@torch.no_grad()
def test_pruned_channels_cost_as_little_as_their_score_says(native: Any) -> None:
    """The score is the Frobenius norm of what the base's output loses with the channel alone."""
    one = layout(dict.fromkeys(ROLES, LowRank(3)), dynamic=1)
    module, whole = shared(native, one), shared(native, LAYOUTS["low rank"])
    lost = float((module(*batch()) - whole(*batch())).norm())
    assert lost == pytest.approx(min(channel_scores(module, *batch()).values()), rel=1e-10)


@each_layout
def test_gradients(native: Any, layout: LayerLayout) -> None:
    module = shared(native, layout, kept_of(layout))
    towards = normal64(TOKENS, D, seed=9)

    def gradients(forward: Any) -> list[Tensor]:
        hidden, index, weights = batch()
        leaves = [hidden.requires_grad_(True), weights.requires_grad_(True), *module.parameters()]
        loss = (forward(hidden, index, weights) * towards).sum()
        return list(torch.autograd.grad(loss, leaves, materialize_grads=True))

    found = gradients(module)
    expected = gradients(lambda *inputs: reference(matrices(module), *inputs))
    unused = layout == LAYOUTS["dense"]  # then nothing depends on the bases
    for position, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if unused and position in (2, 3):
            assert not mine.any()
            continue
        assert theirs.any()
        assert_equal(mine, theirs)


def test_gradients_through_dynamic_pruning(native: Any) -> None:
    module = shared(native, DYNAMIC["pruned base"], KEPT)
    towards = normal64(TOKENS, D, seed=9)

    def gradients(forward: Any) -> list[Tensor]:
        hidden, index, weights = batch()
        hidden.requires_grad_(True)
        return list(
            torch.autograd.grad((forward(hidden, index, weights) * towards).sum(), [hidden, *module.parameters()])
        )

    for mine, theirs in zip(gradients(module), gradients(lambda *i: without_weakest(module, i)[0]), strict=True):
        assert_equal(mine, theirs)


@each_layout
def test_experts_without_tokens(native: Any, layout: LayerLayout) -> None:
    module = shared(native, layout, kept_of(layout))
    hidden, _, weights = batch()
    index = torch.tensor([[3, 1]]).expand(TOKENS, K)
    assert_equal(module(hidden, index, weights), reference(matrices(module), hidden, index, weights))


@each_layout
def test_one_token(native: Any, layout: LayerLayout) -> None:
    module = shared(native, layout, kept_of(layout))
    assert_equal(module(*batch(1)), reference(matrices(module), *batch(1)))


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), *DYNAMIC.values()], ids=[*LAYOUTS, *DYNAMIC])
def test_empty_batch(native: Any, layout: LayerLayout) -> None:
    assert shared(native, layout, kept_of(layout))(*batch(0)).shape == (0, D)


@pytest.mark.parametrize("k", [1, 3, E])
def test_any_number_of_routed_experts(native: Any, k: int) -> None:
    module = shared(native, LAYOUTS["mixed"])
    hidden = normal64(TOKENS, D, seed=5)
    weights, index = normal64(TOKENS, E, seed=6).sigmoid().topk(k)  # nothing says that weights sum to 1
    assert_equal(module(hidden, index, weights), reference(matrices(module), hidden, index, weights))


def test_pairs_for_experts_elsewhere_add_nothing(native: Any) -> None:
    """Expert-parallel transformers marks pairs that belong to another process with the index E."""
    module = shared(native, LAYOUTS["mixed"])
    hidden, index, weights = batch()
    elsewhere = index == 2
    expected = reference(matrices(module), hidden, index, weights.masked_fill(elsewhere, 0))
    assert_equal(module(hidden, index.masked_fill(elsewhere, E), weights), expected)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_every_base_is_multiplied_once_per_token(native: Any, k: int) -> None:
    """By the count of operations: 3 products with a base per token whatever k, and the factors once per pair."""
    rank = 3
    module = shared(native, layout(dict.fromkeys(ROLES, LowRank(rank))))
    hidden = normal64(TOKENS, D, seed=5)
    weights, index = normal64(TOKENS, E, seed=6).softmax(-1).topk(k)
    with FlopCounterMode(display=False) as counter:
        module(hidden, index, weights)
    bases = TOKENS * 3 * D * INTERMEDIATE
    factors = TOKENS * k * 3 * rank * (D + INTERMEDIATE)
    assert counter.get_total_flops() == 2 * (bases + factors)


def test_a_pruned_base_costs_less(native: Any) -> None:
    module = shared(native, layout(dict.fromkeys(ROLES, LowRank(0)), base_channels=9), KEPT)
    with FlopCounterMode(display=False) as counter:
        module(*batch())
    assert counter.get_total_flops() == 2 * TOKENS * 3 * D * 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(native: Any, dtype: torch.dtype) -> None:
    """As accurate as the dtype allows, and nothing is promoted; routing weights may stay fp32."""
    module = shared(native, LAYOUTS["mixed"]).to(dtype)
    hidden, index, weights = batch()
    found = module(hidden.to(dtype), index, weights.float())
    assert found.dtype == dtype
    wide = shared(native, LAYOUTS["mixed"])
    wide.load_state_dict({name: tensor.double() for name, tensor in module.state_dict().items()})
    expected = reference(matrices(wide), hidden.to(dtype).double(), index, weights)
    assert (found.double() - expected).norm() / expected.norm() < 4 * torch.finfo(dtype).eps


def test_dynamic_pruning_in_bf16_scores_in_fp32(native: Any) -> None:
    """Batches of thousands of tokens: a norm accumulated in bf16 would stall and rank channels at random."""
    module = shared(native, DYNAMIC["whole base"])
    module.to(torch.bfloat16)
    hidden, index, weights = batch(2000)
    hidden[:, 0] += 3
    narrow = module(hidden.bfloat16(), index, weights)
    wide = shared(native, DYNAMIC["whole base"])
    wide.load_state_dict({name: tensor.double() for name, tensor in module.state_dict().items()})
    exact = wide(hidden.bfloat16().double(), index, weights)
    assert (narrow.double() - exact).norm() / exact.norm() < 4 * torch.finfo(torch.bfloat16).eps


def test_dynamic_pruning_in_bf16_tells_near_ties_apart(native: Any) -> None:
    """All channels are alike except that column 5 of the base is a little shorter, by less than a bf16 norm can say."""
    module = shared(native, layout(dict.fromkeys(ROLES, LowRank(0)), dynamic=1)).to(torch.bfloat16)
    with torch.no_grad():
        module.gate_up_proj.fill_(0.25)
        module.down_proj.fill_(1)
        module.down_proj[0, 0, 5] = 1 - 2**-8
    hidden, index, weights = batch()
    module(hidden.abs().bfloat16(), index, weights).float().sum().backward()
    assert [channel for channel in range(INTERMEDIATE) if not module.down_proj.grad[0, :, channel].any()] == [5]


def test_the_order_of_tokens_does_not_matter(native: Any) -> None:
    module = shared(native, LAYOUTS["mixed"])
    hidden, index, weights = batch()
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    assert_equal(module(hidden[order], index[order], weights[order]), module(hidden, index, weights)[order])
    assert_equal(module(hidden, index.flip(1), weights.flip(1)), module(hidden, index, weights))


def test_built_where_the_native_module_was(native: Any) -> None:
    module = SharedBaseExperts(native.to(torch.bfloat16).to("meta"), LAYOUTS["pruned"])
    tensors: list[Tensor | nn.Parameter] = [*module.parameters(), *module.buffers()]
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


def test_it_says_what_it_is(native: Any) -> None:
    assert "channels=9/14" in repr(shared(native, LAYOUTS["pruned"], KEPT))
    assert "native" in repr(shared(native, LAYOUTS["native down"]))
