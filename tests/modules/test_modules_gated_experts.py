"""Fused and separate experts of moetool's own mixtures: the same maths in two layouts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_families import build_dense
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures.dense import find_dense_architecture
from moetool.modules.mixture import GatedExperts, MixtureOfFFNs, SeparateExperts

EXPERTS, TOP_K, HIDDEN, WIDTH = 5, 2, 32, 48
SHARED = ["none", "half", "xft", "med"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gated_experts_token_by_token() -> None:
    config = SimpleNamespace(experts=EXPERTS, hidden=6, intermediate=4, act_fn=nn.SiLU())
    experts = GatedExperts(config).double()
    with torch.no_grad():
        experts.gate_up_proj.copy_(normal(EXPERTS, 8, 6))
        experts.down_proj.copy_(normal(EXPERTS, 6, 4, seed=1))
    rows, weights = normal(7, 6, seed=2), normal(7, TOP_K, seed=3)
    chosen = torch.stack(
        [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i))[:TOP_K] for i in range(7)]
    )
    found = experts(rows, chosen, weights)
    for row, own, shares, result in zip(rows, chosen.tolist(), weights, found, strict=True):
        expected = torch.zeros(6).double()
        for expert, share in zip(own, shares, strict=True):
            gate, up = experts.gate_up_proj[expert][:4], experts.gate_up_proj[expert][4:]
            expected = expected + share * (experts.down_proj[expert] @ (F.silu(gate @ row) * (up @ row)))
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def mixture(family: str, shared: str, *, fused: bool) -> MixtureOfFFNs:
    model = build_dense(family).double()
    architecture = find_dense_architecture(model.config.to_dict())
    ffn = model.get_submodule(architecture.ffn_prefix(0).removesuffix("."))
    described = {"experts": EXPERTS, "top_k": TOP_K, "intermediate": WIDTH, "shared": shared, "fused": fused}
    made = MixtureOfFFNs(ffn, architecture, HIDDEN, described)
    gate_up, down = normal(EXPERTS, 2 * WIDTH, HIDDEN) / 6, normal(EXPERTS, HIDDEN, WIDTH, seed=1) / 7
    experts: Any = made.experts
    with torch.no_grad():
        made.gate.weight.copy_(normal(EXPERTS, HIDDEN, seed=2) / 6)
        if fused:
            experts.gate_up_proj.copy_(gate_up)
            experts.down_proj.copy_(down)
            return made
        for index, expert in enumerate(experts):
            expert.down_proj.weight.copy_(down[index])
            if architecture.is_joined:
                expert.gate_up_proj.weight.copy_(gate_up[index])
            else:
                expert.gate_proj.weight.copy_(gate_up[index, :WIDTH])
                expert.up_proj.weight.copy_(gate_up[index, WIDTH:])
    return made


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "qwen3"])
def test_fused_experts_are_the_separate_ones(family: str, shared: str) -> None:
    """With the family's own activation; gradients at the router included."""
    fused, separate = mixture(family, shared, fused=True), mixture(family, shared, fused=False)
    assert isinstance(fused.experts, GatedExperts)
    assert isinstance(separate.experts, SeparateExperts)
    rows = normal(3, 9, HIDDEN, seed=4)
    found, expected = fused(rows), separate(rows)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(fused.gate.weight.grad, separate.gate.weight.grad, rtol=1e-6, atol=1e-8)


def test_experts_without_tokens_have_no_gradient() -> None:
    made = mixture("llama", "none", fused=True)
    chosen, _, _ = made.route(normal(1, HIDDEN, seed=4))
    made(normal(1, HIDDEN, seed=4)).sum().backward()
    gradient = made.get_parameter("experts.down_proj").grad
    assert gradient is not None
    used = gradient.flatten(1).abs().sum(1).nonzero().flatten().tolist()
    assert used == sorted(chosen[0].tolist())
