"""Neurons as experts: every way to compute them against the masked sum, in fp64 where that makes it exact."""

import copy
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from dense_families import build_dense
from sampling import sampled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moetool.architectures.dense import find_dense_architecture
from moetool.compiled.compiler import problem
from moetool.format.kinds.moefied import MoefiedSpec, SelectorKind
from moetool.runtime.modules.insertion import is_placeholder
from moetool.runtime.modules.led_neurons import LedNeurons
from moetool.runtime.modules.moefied import insert
from moetool.runtime.modules.neuron_experts import NeuronExperts

HIDDEN, EXPERTS, KEEP = 32, 8, 0.5
GATED = ["llama", "llama-mlp-bias", "phi3", "gemma"]
FAMILIES = ["llama", "llama-mlp-bias", "phi3", "gpt_neox", "phi", "gpt_bigcode", "starcoder2", "falcon", "gemma"]

SELECTORS = ("mlp", "oracle", "fixed", "gate", "up")  # of which the last two are projections that choose


def pairwise(*values: tuple[Any, ...]) -> list[Any]:
    """Every combination for two families, with gates and without; for the others, every value with every family."""
    rows = [
        (family, *(own[(step + place) % len(own)] for place, own in enumerate(values)))
        for step in range(3)
        for family in FAMILIES
    ]
    return sampled(product(FAMILIES, *values), [*product(("llama", "gpt_neox"), *values), *rows])


def specified(family: str, selector: str, intermediate: int) -> MoefiedSpec:
    """Experts in layer 1, which a selector chooses; a network without a gate is led by up."""
    if selector not in ("gate", "up"):
        return MoefiedSpec(layers=(1,), experts=EXPERTS, keep=KEEP, selector=cast(SelectorKind, selector))
    lead = "gate" if selector == "gate" and family in GATED else "up"
    return MoefiedSpec(layers=(1,), experts=intermediate, keep=KEEP, selector="projection", leads=(lead,))


def build(family: str = "llama", selector: str = "mlp", dtype: torch.dtype = torch.float64) -> NeuronExperts:
    """The experts of one layer of a tiny model, with a random selector, order, price and centre."""
    model = build_dense(family)
    architecture = find_dense_architecture(model.config.to_dict())
    down = model.get_submodule(architecture.weight_name(1, "down").removesuffix(".weight"))
    insert(model, architecture, specified(family, selector, max(down.weight.shape)))
    experts: Any = model.get_submodule(architecture.ffn_prefix(1).removesuffix("."))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        experts.centre.copy_(0.3 * torch.randn(experts.intermediate, generator=draw))
        for parameter in experts.selector.parameters() if selector == "mlp" else []:
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
        if selector == "fixed":
            experts.order.copy_(torch.randperm(EXPERTS, generator=draw))
        if isinstance(experts, LedNeurons):
            experts.price.copy_(torch.rand(experts.intermediate, generator=draw))
    return experts.to(dtype).eval()


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def activations(experts: NeuronExperts, rows: Tensor) -> Tensor:
    """What the network's own forward gives its down matrix."""
    seen: list[Tensor] = []
    with experts.linear("down").register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        experts.ffn(rows)
    return seen[0]


def masked(experts: NeuronExperts, rows: Tensor, chosen: Tensor) -> Tensor:
    """The definition: all activations, those of unselected experts put to r."""
    used = torch.zeros(len(rows), experts.num_experts, dtype=rows.dtype).scatter(1, chosen, 1.0)
    mask = used.repeat_interleave(experts.size, dim=1)
    down, centre = experts.linear("down"), experts.centre
    return F.linear(centre + mask * (activations(experts, rows) - centre), down.weight, down.bias)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_selected_is_the_dense_network_bit_for_bit(family: str) -> None:
    experts = build(family)
    experts.set_keep(1.0)
    assert experts(inputs(2, 3)).equal(experts.ffn(inputs(2, 3)))


@pytest.mark.parametrize(("family", "selector", "tokens", "grad"), pairwise(SELECTORS, (1, 3, 40), (False, True)))
def test_every_path_is_the_masked_sum(family: str, selector: str, tokens: int, grad: bool) -> None:
    experts, rows = build(family, selector), inputs(tokens)
    chosen = experts.select(rows)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(experts(rows), masked(experts, rows, chosen), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("family", "selector", "tokens"), pairwise(("mlp", "fixed"), (1, 3, 24)))
@torch.no_grad()
def test_kernels_give_the_masked_sum(family: str, selector: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, rows = build(family, selector), inputs(tokens)
    experts, chosen = copy.deepcopy(exact).float(), exact.select(rows)
    monkeypatch.setattr(experts, "select", lambda _: chosen)
    found, expected = experts(rows.float()).double(), masked(exact, rows, chosen)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert (experts._cached["neurons"][1] is None) == bool(problem())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lead", ["gate", "up"])
@torch.no_grad()
def test_kernels_read_the_neurons_that_a_projection_chose(
    family: str, lead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, rows, read = build(family, lead), inputs(2), []
    experts: Any = copy.deepcopy(exact).float()
    expected = masked(exact, rows, experts.select(rows.float())).float()
    method = experts._where_they_lie
    monkeypatch.setattr(experts, "_where_they_lie", lambda *given: (read.append(1), method(*given))[1])
    torch.testing.assert_close(experts(rows.float()), expected, rtol=1e-4, atol=1e-6)
    assert len(read) == (not problem())
    assert experts(inputs(40).float()).shape == (40, HIDDEN)
    assert len(read) == (not problem())


def test_a_projection_scores_each_neuron_by_its_square() -> None:
    rows = inputs(5)
    for lead, family in product(("gate", "up"), ("llama", "phi3", "gpt_neox")):
        experts: Any = build(family, lead)
        gate, up = (experts._projected(rows, role) if role in experts.names else None for role in ("gate", "up"))
        value = F.silu(gate) if lead == "gate" and gate is not None else up if gate is not None else F.gelu(up)
        torch.testing.assert_close(experts.scores(rows), value.square() * experts.price)


def test_without_a_gate_a_projection_chooses_what_an_oracle_does() -> None:
    experts, rows = build("gpt_neox", "up"), inputs(6)
    experts.centre.zero_()
    experts.price.fill_(1)
    best = activations(experts, rows).square().topk(experts.kept).indices
    assert experts.select(rows).sort().values.equal(best.sort().values)


def test_a_projection_leads_single_neurons_that_it_has() -> None:
    ffn, names = build("gpt_neox").ffn, {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}
    width = max(ffn.dense_h_to_4h.weight.shape)
    for message, experts, lead in (("not one for each", width // 2, "up"), ("gate should choose", width, "gate")):
        spec = MoefiedSpec(experts=experts, keep=0.5, selector="projection", layers=(0,), leads=(lead,))
        with pytest.raises(ValueError, match=message):
            LedNeurons(ffn, cast(Any, names), F.gelu, HIDDEN, width, spec, None, cast(Any, lead))


def test_each_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, taken = build(), []
    for name in ("by_runs", "by_expert"):
        method = getattr(experts, name)
        monkeypatch.setattr(experts, name, lambda *a, m=method, n=name: (taken.append(n), m(*a))[1])
    for tokens in (1, 3, 40):
        experts(inputs(tokens))
    assert taken == ["by_runs", "by_runs", "by_expert"]


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_the_same(tokens: int, dtype: torch.dtype) -> None:
    experts = build("llama-mlp-bias", dtype=dtype).requires_grad_(False)
    # Groups of 6 neurons are not aligned, and a kernel for them is not there.
    experts.num_experts, experts.size = 2, 24
    rows = inputs(tokens).to(dtype)
    chosen = torch.arange(tokens).remainder(2).unsqueeze(1)
    expected = experts.by_expert(rows, chosen)
    torch.testing.assert_close(
        experts.grouped(rows, chosen), expected, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-2
    )


def test_a_constant_without_experts_and_the_constant_is_computed_once() -> None:
    experts, rows = build("llama-mlp-bias"), inputs(4)
    nothing = masked(experts, rows, torch.zeros(4, 0, dtype=torch.long))
    with torch.no_grad():
        torch.testing.assert_close(experts.constant().expand(4, -1), nothing)
        assert experts.constant() is experts.constant()


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi3"])
@pytest.mark.parametrize("keep", [0.125, 0.5, 0.875])
def test_means_are_preserved_whatever_fixed_experts_are_used(family: str, keep: float) -> None:
    experts, rows = build(family, "fixed"), inputs(200)
    experts.centre.copy_(activations(experts, rows).mean(0))
    experts.set_keep(keep)
    torch.testing.assert_close(experts(rows).mean(0), experts.ffn(rows).mean(0))


def test_without_centres_it_is_the_original_moefication() -> None:
    experts, rows = build("gpt_neox"), inputs(7)
    experts.centre.zero_()
    used = torch.zeros(7, EXPERTS, dtype=rows.dtype).scatter(1, experts.select(rows), 1.0)
    kept = activations(experts, rows).unflatten(1, (EXPERTS, -1)) * used.unsqueeze(-1)
    torch.testing.assert_close(experts(rows), experts.linear("down")(kept.flatten(1)))


def test_oracle_scores_add_up() -> None:
    experts, rows = build("phi3", "oracle"), inputs(9)
    expected = (activations(experts, rows) - experts.centre).square()
    torch.testing.assert_close(experts.scores(rows).sum(1), expected.sum(1))
    torch.testing.assert_close(experts.scores(rows)[:, 2], expected[:, 2 * experts.size : 3 * experts.size].sum(1))


def test_the_selector_is_its_formula_and_ignores_lengths() -> None:
    experts, rows = build(), inputs(6)
    first, second = experts.selector.first.weight, experts.selector.second.weight
    expected = torch.tanh(rows / rows.norm(dim=1, keepdim=True) @ first.t()) @ second.t()
    torch.testing.assert_close(experts.scores(rows), expected)
    torch.testing.assert_close(experts.scores(7 * rows), expected)
    assert experts.scores(torch.zeros_like(rows)).isfinite().all()


@pytest.mark.parametrize("family", ["llama-mlp-bias", "phi3", "gpt_neox"])
@pytest.mark.parametrize("selector", ["mlp", "fixed", "gate", "up"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_masked_sum(family: str, selector: str, tokens: int, recompute: bool) -> None:
    experts = build(family, selector).train()
    weights = list(experts.ffn.parameters())
    experts.dropout = 0.0
    rows = inputs(tokens).requires_grad_()
    chosen, seed = experts.select(rows), inputs(tokens)
    output = checkpoint(experts, rows, use_reentrant=False) if recompute else experts(rows)
    expected_output = masked(experts.eval(), rows, chosen)
    found = torch.autograd.grad((output * seed).sum(), [rows, *weights])
    expected = torch.autograd.grad((expected_output * seed).sum(), [rows, *weights])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_weights_can_be_changed_after_use() -> None:
    experts = build("llama-mlp-bias")
    other, rows = copy.deepcopy(experts), inputs(1)

    def check() -> None:
        with torch.no_grad():
            expected = masked(experts, rows, experts.select(rows))
            torch.testing.assert_close(experts(rows), expected)

    check()
    with torch.no_grad():
        experts.linear("down").bias.add_(1)
    check()
    with torch.no_grad():
        experts.centre.mul_(2)
    check()
    optimiser = torch.optim.SGD(experts.ffn.parameters(), lr=0.1)
    experts(inputs(5)).square().sum().backward()
    optimiser.step()
    check()
    experts.load_state_dict(other.state_dict())
    check()
    experts.load_state_dict({name: 2 * value for name, value in other.state_dict().items()}, assign=True)
    check()
    experts.float().double()
    check()


def test_a_look_between_steps_does_not_change_them() -> None:
    """Few tokens lay a matrix out by neuron, while a fused optimizer holds what it knows of it by rows."""
    trained = []
    for looks in (False, True):
        experts = build("llama").float()
        optimizer = torch.optim.AdamW(experts.ffn.parameters(), lr=0.01, fused=True)
        for _ in range(3):
            experts.train()(inputs(5).float()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if looks:
                with torch.no_grad():
                    experts.eval()(inputs(1).float())
        trained.append(experts.linear("down").weight.detach())
    torch.testing.assert_close(trained[1], trained[0])


def test_the_order_of_a_fixed_selection_can_be_changed_after_use() -> None:
    experts, rows = build(selector="fixed"), inputs(3)
    for _ in range(2):
        torch.testing.assert_close(experts(rows), masked(experts, rows, experts.order[:4].expand(3, -1)))
        experts.order.copy_(experts.order.flip(0))


@pytest.mark.parametrize("tokens", [1, 4, 600])
@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75])
def test_bf16_is_close(tokens: int, keep: float) -> None:
    exact, rows = build("llama-mlp-bias"), inputs(tokens).bfloat16()
    experts = copy.deepcopy(exact).bfloat16()
    experts.set_keep(keep)
    with torch.inference_mode():
        found = experts(rows)
    assert found.dtype == torch.bfloat16
    expected = masked(exact, rows.double(), experts.select(rows)).detach()
    assert float((found.double() - expected).norm() / expected.norm()) < 0.01


def test_modules_made_for_inference_only_work() -> None:
    with torch.inference_mode():
        experts, rows = build(), inputs(1)
        torch.testing.assert_close(experts(rows), masked(experts, rows, experts.select(rows)))


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_the_same_twice_and_in_any_shape(tokens: int) -> None:
    experts, rows = build(), inputs(2, tokens)
    first = experts(rows)
    assert first.shape == rows.shape
    assert first.equal(experts(rows))
    torch.testing.assert_close(experts(rows[1, 0]), first[1, 0])
    assert experts(rows[:, :0]).shape == (2, 0, HIDDEN)


def test_the_share_can_be_changed() -> None:
    experts, seen = build(), []
    experts.on_selection = seen.append
    for keep, kept in ((0.25, 2), (0.8, 6), (1.0, 8)):
        experts.set_keep(keep)
        experts(inputs(3))
        assert experts.kept == kept
        assert seen[-1].shape == (3, kept)
    scores = experts.scores(inputs(3))
    experts.set_keep(0.25)
    experts(inputs(3))
    assert seen[-1].equal(scores.argsort(descending=True)[:, :2])


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.01, 0.05, float("nan")])
def test_impossible_shares_are_refused(keep: float) -> None:
    experts = build()
    with pytest.raises(ValueError):
        experts.set_keep(keep)
    assert experts.kept == 4


def test_what_does_not_fit_is_refused() -> None:
    ffn = build().ffn
    names: Any = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    for message, width, experts_asked in (
        ("48 neurons cannot be divided among 7", 48, 7),
        (r"gate_proj is \(48, 32\), not \(56, 32\)", 56, 8),
    ):
        spec = MoefiedSpec(experts=experts_asked, keep=0.5, selector="mlp", layers=(0,))
        with pytest.raises(ValueError, match=message):
            NeuronExperts(ffn, names, F.silu, HIDDEN, width, spec, None)
    experts = build()
    experts.ffn.up_proj = nn.Sequential(experts.ffn.up_proj)
    left_out = r"Sequential: .* exclude_modules=\['gate_proj', 'up_proj', 'down_proj'\]"
    with pytest.raises(TypeError, match=left_out):
        experts(inputs(1))


def test_dropout_is_where_the_family_has_it() -> None:
    experts = build("gpt_bigcode").train()
    assert experts.dropout == experts.ffn.dropout.p > 0
    assert (experts(inputs(40)) == 0).any()
    assert not (experts.eval()(inputs(40)) == 0).any()


def test_what_is_saved_does_not_depend_on_use(tmp_path: Path) -> None:
    model = build_dense("llama")
    spec = MoefiedSpec(layers=(0, 2), experts=4, keep=0.5, selector="mlp")
    insert(model, find_dense_architecture(model.config.to_dict()), spec)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model(torch.ones(1, 1, dtype=torch.long))
    assert not model.model.layers[0].mlp.linear("down").weight.is_contiguous()
    after = model.state_dict()
    assert all(after[name].equal(before[name]) and after[name].is_contiguous() for name in before)
    model.save_pretrained(tmp_path)
    assert is_placeholder(after["model.layers.0.mlp.up_proj.weight"])
    assert {name for name in after if "layers.2.mlp" in name} == {
        f"model.layers.2.mlp.{name}"
        for name in (
            *(f"ffn.{role}_proj.weight" for role in ("gate", "up", "down")),
            *("selector.first.weight", "selector.second.weight", "centre", "up_proj.weight"),
        )
    }


def test_dense_again_after_decoding() -> None:
    experts = build()
    with torch.inference_mode():
        experts(inputs(1))
        experts.set_keep(1.0)
        assert experts(inputs(1)).equal(experts.ffn(inputs(1)))
    assert experts.linear("down").weight.is_contiguous()
