"""`--train lora` in memory and read layer by layer: low-rank updates of attention and experts, in every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from derived_families import DERIVED
from families import FAMILIES, build
from safetensors.torch import load_file, save_file
from sampling import MOE_STRUCTURES, sampled
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.runtime.loading import load_model
from moetool.runtime.modules.routers import Routers
from moetool.training.changed import ChangedModel
from moetool.tune.choice import choose_for, trained_parameters
from moetool.tune.low_rank import adapted, factor_numbers, open_changed, streamed_as
from moetool.tune.options import TuneOptions
from moetool.tune.writing import layers_by_name, stored

LORA = TuneOptions(data="text.txt", train="lora", lora_rank=2, lora_alpha=6)
TOKENS = torch.arange(1, 17).view(2, 8)


def opened(source: Path, *, streams: bool = False) -> ChangedModel:
    checkpoint = Checkpoint.open(source)
    return open_changed(checkpoint, LORA, torch.float32, torch.device("cpu"), streams=streams)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


def learnt(changed: ChangedModel) -> dict[str, Tensor]:
    """Let every factor have learnt something; gradients of what is trained, by its name."""
    torch.manual_seed(0)
    trained = {name: own for name, own in changed.model.named_parameters() if own.requires_grad}
    with torch.no_grad():
        for name, own in trained.items():
            if name.startswith("low_rank."):
                own.add_(0.1 * torch.randn(own.shape))
    changed.model(input_ids=TOKENS, use_cache=False).logits.square().sum().backward()
    return {name: own.grad for name, own in trained.items()}


def rewritten(source: Path, changed: ChangedModel) -> Path:
    """The checkpoint with what was trained in its place, as `tune` writes it."""
    tensors = load_file(source / "model.safetensors")
    layers = layers_by_name(changed, Checkpoint.open(source))
    for layer in changed.layers:
        made = stored(changed, changed.trained(layer), Checkpoint.open(source))
        assert all(layers[name] == layer for name in made)
        for name in made:
            assert made[name].shape == tensors[name].shape, name
            tensors[name] = made[name].to(tensors[name].dtype).contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


@pytest.mark.parametrize("family", sampled([*FAMILIES, *DERIVED], MOE_STRUCTURES))
def test_what_is_written_is_what_was_trained(family: str, save_model: Any, tmp_path: Path) -> None:
    """And layers that are read when they run compute and learn the same."""
    model = build(family, **DERIVED.get(family, {}))
    source = save_model(model, tmp_path / "model")
    before = logits(load_model(Checkpoint.open(source), torch.float32))
    changed = opened(source)
    assert (logits(changed.model) - before).norm() < 1e-6 * before.norm()
    names = {name for name, own in changed.model.named_parameters() if own.requires_grad}
    choose_for(model, LORA)
    own, shapes = trained_parameters(model), adapted(model, 2)
    routers = [each for router in Routers(model).modules for each in router.parameters()]
    assert own == sum(each.numel() for each in routers if each.requires_grad)
    assert trained_parameters(changed.model) == own + sum(factor_numbers(shape, 2) for shape in shapes.values())
    assert any("experts" in name for name in shapes)
    gradients = learnt(changed)
    assert gradients.keys() == names
    after = logits(changed.model)
    assert (after - before).norm() > 0.01 * before.norm()
    if streamed_as(Checkpoint.open(source)) is not None:
        streamed = opened(source, streams=True)
        assert (logits(streamed.model) - before).norm() < 1e-6 * before.norm()
        assert trained_parameters(streamed.model) == trained_parameters(changed.model)
        found = learnt(streamed)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (gradient is None) == (found[name] is None), name
            assert gradient is None or torch.allclose(found[name], gradient, atol=1e-6, rtol=1e-4), name
        assert (logits(streamed.model) - after).norm() < 1e-5 * after.norm()
    again = logits(load_model(Checkpoint.open(rewritten(source, changed)), torch.float32))
    assert (again - after).norm() < 1e-5 * after.norm()


def test_an_update_is_alpha_over_rank_times_the_product(save_model: Any, tmp_path: Path) -> None:
    """Of each expert its own."""
    name = "model.layers.1.mlp.experts.down_proj"
    changed = opened(save_model(build("mixtral"), tmp_path / "model"))
    before = changed.model.get_parameter(name).clone()
    place = [*adapted(build("mixtral").requires_grad_(False), 2)].index(name)
    numbers = changed.model.get_parameter(f"low_rank.{place}")
    count, rows, columns = before.shape
    assert numbers.shape == (count, 2, columns + rows)
    with torch.no_grad():
        numbers[1, :, columns:] = torch.randn(2, rows)
    after = changed.trained(1)[name]
    assert torch.allclose(after[1], before[1] + 3 * numbers[1, :, columns:].T @ numbers[1, :, :columns], atol=1e-6)
    assert not torch.allclose(after[1], before[1], atol=1e-3)
    assert all(after[expert].equal(before[expert]) for expert in (0, 2, 3))
    assert changed.model.get_parameter(name).equal(before)
