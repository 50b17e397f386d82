"""`--train lora` in memory: low-rank factors of experts that are stored in full, in every family."""

from typing import Any

import pytest
import torch
from derived_families import DERIVED
from families import FAMILIES, build
from sampling import MOE_STRUCTURES, sampled

from moetool.checkpoint.reader import Checkpoint
from moetool.runtime.modules.routers import Routers
from moetool.tune.choice import choose_for, trained_parameters
from moetool.tune.lora import adapts_experts, add_lora, experts_in_full, merge_lora
from moetool.tune.options import TuneOptions

LORA = TuneOptions(data="text.txt", train="lora", lora_rank=2)
TOKENS = torch.arange(1, 17).view(2, 8)


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize("family", sampled([*FAMILIES, *DERIVED], MOE_STRUCTURES))
def test_merged_is_what_was_trained(family: str, save_model: Any, tmp_path: Any) -> None:
    model = build(family, **DERIVED.get(family, {}))
    source, keys = Checkpoint.open(save_model(model, tmp_path / "model")), set(model.state_dict())
    adapted, before = choose_for(model, LORA), _logits(model)
    trained = trained_parameters(model)
    routers = [parameter for router in Routers(model).modules for parameter in router.parameters()]
    assert trained == sum(parameter.numel() for parameter in routers if parameter.is_floating_point())
    assert set(adapted.experts) == {
        name for name, parameter in model.named_parameters() if "experts" in name and parameter.dim() == 3
    }
    add_lora(model, adapted, 2, 6.0)
    assert _logits(model).equal(before)
    assert trained_parameters(model) == trained + adapted.numbers(build(family, **DERIVED.get(family, {})), 2)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    expected = _logits(model)
    assert (expected - before).norm() > 0.01 * before.norm()
    model(input_ids=TOKENS, use_cache=False).logits.square().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
    merge_lora(model, source)
    assert not adapts_experts(model)
    assert set(model.state_dict()) == keys
    assert (_logits(model) - expected).norm() < 1e-5 * expected.norm()


def test_factors_of_an_expert_are_its_own() -> None:
    """What one expert learns changes no other, and is alpha / rank times the product of its factors."""
    model = build("mixtral")
    name = "model.layers.1.mlp.experts.down_proj"
    assert name in experts_in_full(model)
    adapted, before = choose_for(model, LORA), model.get_parameter(name).clone()
    add_lora(model, adapted, 2, 6.0)
    layer = model.get_submodule("model.layers.1.mlp.experts")
    if layer.parameter_name != "down_proj":
        layer = layer.base_layer
    count, rows, columns = before.shape
    second = layer.lora_B["default"].weight.data
    chosen = torch.zeros(rows, 2, count)
    chosen[..., 1] = torch.randn(rows, 2)
    second.copy_(chosen.view(rows, 2 * count))
    first = layer.lora_A["default"].weight.detach().view(count, 2, columns)[1]
    merge_lora(model, Checkpoint.__new__(Checkpoint))
    after = model.get_parameter(name)
    assert torch.allclose(after[1], before[1] + 3 * chosen[..., 1] @ first, atol=1e-6)
    assert not torch.allclose(after[1], before[1], atol=1e-3)
    assert all(after[expert].equal(before[expert]) for expert in (0, 2, 3))
