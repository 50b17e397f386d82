"""What is trained of experts that are deltas to a base."""

from pathlib import Path

import pytest
from derived_families import DERIVED
from families import build
from kinds import save_kind
from transformers import AutoModelForCausalLM

from moetool.errors import UsageError
from moetool.repair.training import choose as repaired
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.tune.choice import choose, choose_for
from moetool.tune.options import TuneOptions


@pytest.mark.parametrize("kind", ["low-rank", "trellis"])
def test_a_base_is_left_alone_in_whatever_form(kind: str, tmp_path: Path) -> None:
    """Experts that are stored natively, where a layer has some, are no base."""
    model = AutoModelForCausalLM.from_pretrained(save_kind(kind, tmp_path))
    choose(model, "auto", freeze_shared=True)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SharedBaseExperts)}
    frozen, trained = set(), set()
    for path, module in layers.items():
        for name, parameter in module.named_parameters():
            is_native = name == "down_proj" and module.layout.weights["down"] is None
            is_base = (not is_native and not name.startswith("moetool.")) or name.startswith("moetool.base.")
            (frozen if is_base else trained).add(f"{path}.{name}")
            assert parameter.requires_grad == (not is_base), name
    assert frozen
    assert trained
    assert any(".moetool.base." in name for name in frozen) == (kind == "trellis")
    assert any(name.endswith("down_proj") for name in trained) == (kind == "low-rank")


def test_nothing_is_held_quantized_where_no_linear_layer_is_left(tmp_path: Path) -> None:
    """All are trained, or stored as codes: the option would do nothing."""
    path = save_kind("beside", tmp_path)
    assert choose_for(AutoModelForCausalLM.from_pretrained(path), TuneOptions(data="text.txt", quantize_base="nf4"))
    whole = AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(UsageError, match="--quantize-base: no linear layer is left that is not trained itself"):
        choose_for(whole, TuneOptions(data="text.txt", quantize_base="nf4", train="all"))


@pytest.mark.parametrize("family", ["llama4_text", "gemma4_text", "deepseek_v4", "zaya"])
def test_routers_are_trained_with_experts_whatever_they_return(family: str) -> None:
    model = build(family, **DERIVED[family])
    choose(model, "experts", freeze_shared=False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    routers = {name for name, _ in model.named_parameters() if ".router." in name or ".mlp.gate." in name}
    assert routers
    assert routers <= trained
    assert trained - routers == {name for name in trained if ".experts." in name} != set()
    assert repaired(model, "routers").keys() == routers
