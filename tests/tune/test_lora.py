"""Low-rank factors on what is not trained itself, and what they leave behind."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from upcycled import interpolated, load, logits, open_dense, relative_error, save_dense, with_adapters, write_upcycled

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, UsageError
from moetool.runtime.modules.simoe import sites
from moetool.tune.choice import choose
from moetool.tune.lora import Quantization, add_lora, frozen_linears, merge_lora, quantize_linears

RANK, ALPHA = 2, 6.0
BLOCKS = {"hidden_size": 64, "intermediate_size": 128}  # rows of whole blocks
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:bitsandbytes", "ignore::DeprecationWarning")

MakeModel = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module")
def pesc(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """`pesc("llama", **config)`: adapters on a model of that family, experts chosen to be trained, and its path."""
    directory = tmp_path_factory.mktemp("lora")

    def make(family: str, **config: Any) -> tuple[Any, Path]:
        path = directory / "-".join([family, *map(str, config.values())])
        if not path.exists():
            dense = save_dense(path.with_name(f"{path.name}-dense"), family, **config)
            write_upcycled(path, with_adapters(open_dense(dense)))
        model = load(path)
        choose(model, "experts", freeze_shared=False)
        return model, path

    return make


def learn(model: Any) -> None:
    """Let every trained number have learnt something."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "falcon", "gpt_bigcode", "phi3"])
def test_factors_and_experts_are_trained_and_nothing_else(family: str, pesc: MakeModel) -> None:
    model, _ = pesc(family)
    experts = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".adapters." in name or name.endswith(".gate.weight") for name in experts)
    names = frozen_linears(model)
    sizes = [sum(model.get_submodule(name).weight.shape) for name in names]
    before = logits(model)
    add_lora(model, names, RANK, ALPHA)
    assert logits(model).equal(before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == experts
    factors = [parameter.numel() for name, parameter in model.named_parameters() if ".lora_" in name]
    assert sum(factors) == RANK * sum(sizes)


def test_routers_heads_and_embeddings_get_no_factors(pesc: MakeModel) -> None:
    model, _ = pesc("llama")
    parts = {name.rpartition(".")[2] for name in frozen_linears(model)}
    assert parts == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "falcon", "gpt_bigcode", "phi3"])
def test_merged_is_what_was_trained(family: str, pesc: MakeModel) -> None:
    model, path = pesc(family)
    keys = set(model.state_dict())
    add_lora(model, frozen_linears(model), RANK, ALPHA)
    untrained = logits(model)
    learn(model)
    expected = logits(model)
    assert relative_error(expected, untrained) > 0.01
    merge_lora(model, Checkpoint.open(path))
    assert relative_error(logits(model), expected) < 1e-5
    assert set(model.state_dict()) == keys
    assert not any("lora" in type(module).__name__.lower() for module in model.modules())


def test_the_merged_weight_is_the_product_times_alpha_over_rank(pesc: MakeModel) -> None:
    model, path = pesc("llama")
    name = "model.layers.1.self_attn.q_proj"
    add_lora(model, [name], RANK, ALPHA)
    learn(model)
    layer = model.get_submodule(name)
    before = layer.get_base_layer().weight.detach().clone()
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    merge_lora(model, Checkpoint.open(path))
    merged = model.get_submodule(name).weight
    assert torch.allclose(merged, before + ALPHA / RANK * product, atol=1e-6)
    assert not torch.allclose(merged, before, atol=1e-3)


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_base_in_few_bits_comes_back_exactly(family: str, kind: Quantization, pesc: MakeModel) -> None:
    model, path = pesc(family, **BLOCKS)
    stored = load_file(path / "model.safetensors")
    names = frozen_linears(model)
    whole = logits(model)
    quantize_linears(model, names, kind, torch.device("cpu"))
    assert 1e-4 < relative_error(logits(model), whole) < 0.5
    add_lora(model, names[::2], RANK, ALPHA)
    learn(model)
    products = {name: model.get_submodule(name).get_delta_weight("default") for name in names[::2]}
    merge_lora(model, Checkpoint.open(path))
    assert all(type(model.get_submodule(name)) is nn.Linear for name in names)
    for name in names:
        weight = model.get_submodule(name).weight
        if name in products:
            assert torch.allclose(weight, stored[f"{name}.weight"] + products[name], atol=1e-6), name
        else:
            assert weight.equal(stored[f"{name}.weight"]), name
        if f"{name}.bias" in stored:
            assert model.get_submodule(name).bias.equal(stored[f"{name}.bias"])


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gradients_flow_through_a_base_in_few_bits(kind: Quantization, pesc: MakeModel) -> None:
    """The same before and after the model has run in evaluation mode."""
    found = []
    for evaluated in (False, True):
        model, _ = pesc("llama", **BLOCKS)
        names = frozen_linears(model)
        quantize_linears(model, names, kind, torch.device("cpu"))
        add_lora(model, names, RANK, ALPHA)
        learn(model)
        if evaluated:
            logits(model)
        model.train()
        tokens = torch.arange(1, 17).view(2, 8)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    for name, gradient in found[0].items():
        assert gradient is not None, name
        assert found[1][name].equal(gradient), name


@needs_bitsandbytes
def test_a_base_of_interpolated_experts_comes_back_exactly(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", "llama", **BLOCKS)
    path = write_upcycled(tmp_path / "simoe", interpolated(open_dense(dense)))
    model = load(path)
    choose(model, "auto", freeze_shared=False)
    names = frozen_linears(model)
    assert set(names) == {f"{name}.linear" for name in sites(model)}
    before = logits(model)
    quantize_linears(model, names, "nf4", torch.device("cpu"))
    assert not logits(model).equal(before)
    merge_lora(model, Checkpoint.open(path))
    assert logits(model).equal(before)


@needs_bitsandbytes
def test_a_source_that_lacks_a_layer_is_named(pesc: MakeModel, tmp_path: Path) -> None:
    model, path = pesc("llama")
    name = "model.layers.1.self_attn.q_proj"
    quantize_linears(model, [name], "nf4", torch.device("cpu"))
    stored = load_file(path / "model.safetensors")
    del stored[f"{name}.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    with pytest.raises(InvalidInputError, match=rf"no tensor {name}\.weight"):
        merge_lora(model, Checkpoint.open(tmp_path))


def test_without_bitsandbytes_the_reason_is_told(pesc: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model, _ = pesc("llama")
    with pytest.raises(UsageError, match="pip install bitsandbytes"):
        quantize_linears(model, frozen_linears(model), "nf4", torch.device("cpu"))
