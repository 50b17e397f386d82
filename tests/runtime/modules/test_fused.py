"""Fused experts of custom MoE layers, against so many networks of the family's own class."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_families import build_dense
from draws import normal64
from torch import Tensor, nn
from torch.nn import functional as F
from upcycled import fill_expert

from moetool.architectures import MoEShape
from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.architectures.dense.networks import network_in
from moetool.runtime.modules.fused import weighted_sum
from moetool.runtime.modules.moe import FusedExperts

EXPERTS, TOP_K, HIDDEN = 5, 2, 32
FAMILIES = ["llama", "llama-mlp-bias", "phi3", "gemma2", "gpt_neox", "gpt_bigcode", "starcoder2", "falcon", "phi"]


def routing(tokens: int) -> tuple[Tensor, Tensor]:
    draws = [torch.Generator().manual_seed(i) for i in range(tokens)]
    chosen = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for draw in draws])
    return chosen, normal64(tokens, TOP_K, seed=3)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_token_by_token(gated: bool, biased: bool) -> None:
    roles: Any = ("gate", "up", "down") if gated else ("up", "down")
    shape = MoEShape(EXPERTS, TOP_K, 6, 4, roles, roles if biased else ())
    experts: Any = FusedExperts(SimpleNamespace(shape=shape, act_fn=nn.SiLU())).double()
    first = "gate_up_proj" if gated else "up_proj"
    names = {first, "down_proj"} | ({f"{first}_bias", "down_proj_bias"} if biased else set())
    assert {name for name, _ in experts.named_parameters()} == names
    with torch.no_grad():
        for seed, parameter in enumerate(experts.parameters()):
            parameter.copy_(normal64(*parameter.shape, seed=seed))
    rows, (chosen, weights) = normal64(7, 6, seed=9), routing(7)
    found = experts(rows, chosen, weights)
    bias = {name: getattr(experts, f"{name}_bias", torch.zeros(EXPERTS, 1)) for name in (first, "down_proj")}
    for row, own, shares, result in zip(rows, chosen.tolist(), weights, found, strict=True):
        expected = torch.zeros(6).double()
        for expert, share in zip(own, shares, strict=True):
            values = getattr(experts, first)[expert] @ row + bias[first][expert]
            activation = F.silu(values[:4]) * values[4:] if gated else F.silu(values)
            expected += share * (experts.down_proj[expert] @ activation + bias["down_proj"][expert])
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def networks(family: str) -> tuple[FusedExperts, list[nn.Module], DenseArchitecture]:
    """Fused experts, and as many dense networks with the same weights, all different."""
    model = build_dense(family).double().eval()
    architecture = find_dense_architecture(model.config.to_dict())
    ffn = model.get_submodule(architecture.ffn_prefix(0).removesuffix("."))
    width = ffn.get_submodule(architecture.weights["down"].removesuffix(".weight")).weight.shape[1]
    own = {name for name, _ in ffn.named_parameters()}
    biases = tuple(r for r, name in architecture.weights.items() if name.removesuffix("weight") + "bias" in own)
    shape = MoEShape(EXPERTS, TOP_K, HIDDEN, int(width), architecture.roles, biases)
    experts = FusedExperts(SimpleNamespace(shape=shape, act_fn=network_in(ffn).activation)).double()
    apart = [copy.deepcopy(ffn) for _ in range(EXPERTS)]
    for index, network in enumerate(apart):
        with torch.no_grad():
            for seed, parameter in enumerate(network.parameters()):
                parameter.copy_(normal64(*parameter.shape, seed=100 * index + seed) / 5)
        fill_expert(experts, index, network, architecture)
    return experts, apart, architecture


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_networks_of_the_family(family: str) -> None:
    """With the family's own activation; gradients at the input and the routing weights included."""
    experts, apart, _ = networks(family)
    results = []

    def separate(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(lambda expert, rows: apart[expert](rows), hidden, chosen, weights)

    for run in (experts, separate):
        rows, (chosen, weights) = normal64(9, HIDDEN, seed=4).requires_grad_(), routing(9)
        weights.requires_grad_()
        output = run(rows, chosen, weights)
        output.square().sum().backward()
        results.append((output.detach(), rows.grad, weights.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


def test_experts_without_tokens_have_no_gradient() -> None:
    experts, _, _ = networks("gpt_neox")
    chosen, weights = torch.tensor([[3, 1]]), torch.tensor([[0.6, 0.4]]).double()
    experts(normal64(1, HIDDEN, seed=4), chosen, weights).sum().backward()
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.flatten(1).abs().sum(1).nonzero().flatten().tolist() == [1, 3], name
