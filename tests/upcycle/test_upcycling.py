"""Upcycled models against the dense ones: what they compute, what is in them, and what it is called."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_families import DENSE_FAMILIES
from safetensors.torch import load_file
from torch import Tensor
from upcycled import (
    EXPERTS,
    TOP_K,
    load,
    logits,
    open_dense,
    relative_error,
    save_dense,
    upcycled,
    write_upcycled,
)

from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.format.families import architecture_of
from moetool.job.blueprint import imagine
from moetool.runtime.dense import DenseModel
from moetool.upcycle.experts import Pieces
from moetool.upcycle.targets import targets

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[DenseModel, Tensor]]:
    """A dense model of a family, saved, and its logits by transformers itself."""
    directory = tmp_path_factory.mktemp("dense")
    known: dict[str, tuple[DenseModel, Tensor]] = {}

    def get(family: str) -> tuple[DenseModel, Tensor]:
        if family not in known:
            path = save_dense(directory / family, family)
            known[family] = open_dense(path), logits(load(path))
        return known[family]

    return get


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_copies_compute_what_the_dense_model_computes(family: str, source: Any, tmp_path: Path) -> None:
    """In every family that can hold it; loaded with nothing but transformers, and with moetool for its own module."""
    dense, expected = source(family)
    able = [name for name, target in targets().items() if not target.missing(dense.features)]
    for target in able:
        model = load(write_upcycled(tmp_path / target, upcycled(dense, target)))
        assert model.config.model_type == (dense.config.model_type if target == "moetool" else target)
        assert relative_error(logits(model), expected) < TOLERANCE, target


SHAPES: dict[str, dict[str, Any]] = {
    "half": {"shared": "half"},
    "xft": {"shared": "xft"},
    "some layers": {"layers": (0, 2)},
    "half, one layer": {"shared": "half", "layers": (1,)},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "llama-mlp-bias", "falcon"])
def test_shared_experts_and_dense_layers_preserve_it_too(family: str, shape: str, source: Any, tmp_path: Path) -> None:
    dense, expected = source(family)
    model = load(write_upcycled(tmp_path / "out", upcycled(dense, **SHAPES[shape])))
    assert relative_error(logits(model), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen2", "qwen3", "olmo2", "phi3", "llama-mlp-bias", "gpt_neox"])
def test_pieces_preserve_it_too(family: str, source: Any, tmp_path: Path) -> None:
    dense, expected = source(family)
    model = upcycled(dense, experts=Pieces(dense, 4, dense.dtype), granularity=4)
    path = write_upcycled(tmp_path / "out", model)
    assert relative_error(logits(load(path)), expected) < TOLERANCE


def test_un_renormalised_routing_does_not(source: Any, tmp_path: Path) -> None:
    """Med-MoE as published: (1 + Σp)·FFN."""
    dense, expected = source("llama")
    model = load(write_upcycled(tmp_path / "out", upcycled(dense, shared="med")))
    assert relative_error(logits(model), expected) > 0.05


def written(model: Any, path: Path) -> dict[str, Tensor]:
    return load_file(write_upcycled(path, model) / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmo2", "gemma", "phi3"])
@pytest.mark.parametrize("shared", ["none", "half"])
def test_names_and_counts_are_those_of_the_family(family: str, shared: Any, source: Any, tmp_path: Path) -> None:
    """A model of the target saves the very names that were written; `parameters` counts it, and what a token uses."""
    dense, _ = source(family)
    made = upcycled(dense, shared=shared)
    tensors = written(made, tmp_path / "out")
    model = load(tmp_path / "out")
    counts = made.parameters()
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    idle = 3 * (EXPERTS - TOP_K) * 3 * dense.hidden * dense.intermediate
    assert counts.active == counts.total - idle
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(tensors)
    assert all(again[name].equal(tensor) for name, tensor in tensors.items())


MISTRAL_7B = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
LLAMA_3_8B = {**MISTRAL_7B, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256}


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(MISTRAL_7B, 46_702_792_704, 12_879_925_248), (LLAMA_3_8B, 47_491_321_856, 13_668_454_400)],
)
def test_published_sizes(
    config: dict[str, Any], total: int, active: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral-8x7B has 46,702,792,704 parameters; from headers alone."""
    monkeypatch.setattr("upcycled.EXPERTS", 8)
    dense = DenseModel(imagine("x", tmp_path, config))
    made = upcycled(dense)
    assert made.target.name == "mixtral"
    assert made.spec.experts == 8
    added = total - sum(info.nbytes for info in dense.checkpoint.tensors.values()) // 2
    assert made.parameters() == (total, active, added)


def test_experts_are_the_ffn_bit_for_bit_and_so_is_the_rest(source: Any, tmp_path: Path) -> None:
    dense, _ = source("llama")
    tensors = written(upcycled(dense), tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    experts = ExpertReader(checkpoint, architecture_of(checkpoint.config))
    for layer in range(3):
        for expert in range(EXPERTS):
            for role in ("gate", "up", "down"):
                assert experts.dense(layer, expert, role).equal(dense.matrix(layer, role))
    before = load_file(dense.checkpoint.path / "model.safetensors")
    rest = {name: tensor for name, tensor in before.items() if ".mlp." not in name}
    assert {name: tensor for name, tensor in tensors.items() if "block_sparse_moe" not in name}.keys() == rest.keys()
    assert all(tensors[name].equal(tensor) for name, tensor in rest.items())


def test_the_router_is_the_one_that_was_given(source: Any, tmp_path: Path) -> None:
    dense, _ = source("llama")
    rows = [torch.full((EXPERTS, 32), float(layer)) + torch.arange(32) for layer in range(3)]
    tensors = written(upcycled(dense, router=rows.__getitem__), tmp_path / "out")
    for layer in range(3):
        assert tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"].equal(rows[layer])


def test_joined_projections_are_taken_apart(source: Any, tmp_path: Path) -> None:
    dense, _ = source("phi3")
    tensors = written(upcycled(dense, "qwen2_moe", layers=(1,)), tmp_path / "out")
    before = load_file(dense.checkpoint.path / "model.safetensors")
    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn."
        parts = [tensors[f"{attention}{name}_proj.weight"] for name in "qkv"]
        assert [len(part) for part in parts] == [32, 16, 16]
        assert torch.cat(parts).equal(before[f"{attention}qkv_proj.weight"])
        assert all(tensors[f"{attention}{name}_proj.bias"].eq(0).all() for name in "qkv")
    halves = [tensors[f"model.layers.0.mlp.{role}_proj.weight"] for role in ("gate", "up")]
    assert torch.cat(halves).equal(before["model.layers.0.mlp.gate_up_proj.weight"])
    assert not any("qkv_proj" in name or "gate_up_proj" in name for name in tensors)


def test_norms_that_are_kept_less_one_are_written_whole(source: Any, tmp_path: Path) -> None:
    dense, _ = source("gemma")
    before = load_file(dense.checkpoint.path / "model.safetensors")
    tensors = written(upcycled(dense), tmp_path / "native")
    norms = [name for name in before if name.endswith("norm.weight")]
    assert len(norms) == 7
    for name in norms:
        assert tensors[name].equal((before[name].double() + 1).float())
    own = written(upcycled(dense, "moetool"), tmp_path / "own")
    assert all(own[name].equal(before[name]) for name in norms)


def test_biases_that_a_family_always_has_are_zero_and_others_are_kept(source: Any, tmp_path: Path) -> None:
    dense, _ = source("qwen2")
    before = load_file(dense.checkpoint.path / "model.safetensors")
    kept = written(upcycled(dense, "qwen2_moe"), tmp_path / "qwen2")
    completed = written(upcycled(dense, "granitemoe"), tmp_path / "granite")
    for name in (name for name in before if name.endswith("_proj.bias")):
        assert kept[name].equal(before[name])
        assert completed[name].equal(before[name])
    output = "model.layers.1.self_attn.o_proj.bias"
    assert output not in kept
    assert completed[output].equal(torch.zeros(32))
    plain = written(upcycled(source("llama")[0], "granitemoe"), tmp_path / "plain")
    assert not any(name.endswith("bias") for name in plain)


def test_an_idle_shared_expert_is_silent_and_can_be_trained(source: Any, tmp_path: Path) -> None:
    dense, _ = source("qwen2")
    tensors = written(upcycled(dense, "qwen2_moe"), tmp_path / "out")
    gates = []
    for layer in range(3):
        shared = f"model.layers.{layer}.mlp.shared_expert"
        assert tensors[f"{shared}.down_proj.weight"].eq(0).all()
        for role in ("gate", "up"):
            assert tensors[f"{shared}.{role}_proj.weight"].std().item() == pytest.approx((3 * 32) ** -0.5, rel=0.1)
        gate = tensors[f"{shared}_gate.weight"]
        assert gate.shape == (1, 32)
        # Zeros would be NaN in one GGUF runtime; these are too small for the sigmoid to be anything but a half.
        assert gate.ne(0).all()
        assert gate.abs().max() < 1e-6
        assert gate.half().ne(0).all()
        gates.append(gate)
    assert not gates[0].equal(gates[1])


def test_half_and_half(source: Any, tmp_path: Path) -> None:
    """What is added as it stands is halved; what goes through a gate of one half is not."""
    dense, _ = source("llama")
    down = dense.matrix(1, "down")
    granite = written(upcycled(dense, shared="half"), tmp_path / "granite")
    prefix = "model.layers.1."
    assert granite[f"{prefix}shared_mlp.output_linear.weight"].equal(down / 2)
    assert granite[f"{prefix}block_sparse_moe.output_linear.weight"].equal((down / 2).expand(EXPERTS, -1, -1))
    gate_up = torch.cat([dense.matrix(1, "gate"), dense.matrix(1, "up")])
    assert granite[f"{prefix}shared_mlp.input_linear.weight"].equal(gate_up)
    qwen = written(upcycled(dense, "qwen2_moe", shared="half"), tmp_path / "qwen")
    assert qwen[f"{prefix}mlp.shared_expert.down_proj.weight"].equal(down)
    assert qwen[f"{prefix}mlp.experts.3.down_proj.weight"].equal(down / 2)
    own = written(upcycled(dense, "moetool", shared="half"), tmp_path / "own")
    assert own[f"{prefix}mlp.shared_expert.down_proj.weight"].equal(down)
    assert own[f"{prefix}mlp.experts.down_proj"].equal(down.expand(EXPERTS, -1, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept_and_widened_on_request(dtype: torch.dtype, tmp_path: Path) -> None:
    dense = open_dense(save_dense(tmp_path / "dense", "llama", dtype=dtype))
    before = load_file(tmp_path / "dense" / "model.safetensors")
    same, wide = upcycled(dense), upcycled(dense, dtype=torch.float32)
    kept, widened = written(same, tmp_path / "same"), written(wide, tmp_path / "wide")
    assert {tensor.dtype for tensor in kept.values()} == {dtype}
    assert {tensor.dtype for tensor in widened.values()} == {torch.float32}
    assert all(widened[name].to(dtype).equal(tensor) for name, tensor in before.items() if name in widened)
    expert = "model.layers.2.block_sparse_moe.experts.1.w2.weight"
    assert widened[expert].equal(kept[expert].float())
    assert same.config()["dtype"] == str(dtype).removeprefix("torch.")
    assert wide.config()["dtype"] == "float32"
    # The router of the wide one has not been rounded.
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert widened[router].to(dtype).equal(kept[router])
    assert not widened[router].equal(kept[router].float())


def test_the_old_name_of_the_dtype_stays(source: Any) -> None:
    dense, _ = source("llama")
    config = {key: value for key, value in dense.checkpoint.config.items() if key != "dtype"}
    old = DenseModel(
        Checkpoint(
            "x",
            dense.checkpoint.path,
            {**config, "torch_dtype": "float32"},
            dense.checkpoint.tensors,
            dense.checkpoint.weight_files,
            dense.checkpoint.weight_bytes,
            "",
            (),
        )
    )
    found = upcycled(old, dtype=torch.float32).config()
    assert found["torch_dtype"] == "float32"
    assert "dtype" not in found


@pytest.mark.parametrize("family", ["phi3", "gemma"])
def test_the_rest_is_the_mean_of_several_models(family: str, tmp_path: Path) -> None:
    """Formed in fp32, also where tensors are taken apart or shifted; experts come from where they are told to."""
    models = [
        open_dense(save_dense(tmp_path / str(seed), family, seed=seed, dtype=torch.bfloat16)) for seed in range(3)
    ]
    before = [load_file(model.checkpoint.path / "model.safetensors") for model in models]
    target = "qwen2_moe" if family == "phi3" else "granitemoe"
    layers = (1,) if family == "phi3" else None
    tensors = written(upcycled(models[0], target, rest=models, layers=layers), tmp_path / "out")

    def mean(name: str) -> Tensor:
        return torch.stack([one[name].float() for one in before]).mean(0).bfloat16()

    for name in ("model.embed_tokens.weight", "model.layers.2.self_attn.o_proj.weight"):
        assert tensors[name].equal(mean(name))
        assert not tensors[name].equal(before[0][name])
    if family == "phi3":
        attention = "model.layers.0.self_attn."
        joined = torch.cat([tensors[f"{attention}{name}_proj.weight"] for name in "qkv"])
        assert joined.equal(mean(f"{attention}qkv_proj.weight"))
        gate_up = torch.cat([tensors[f"model.layers.0.mlp.{role}_proj.weight"] for role in ("gate", "up")])
        assert gate_up.equal(mean("model.layers.0.mlp.gate_up_proj.weight"))
        expert = tensors["model.layers.1.mlp.experts.2.down_proj.weight"]
        assert expert.equal(before[0]["model.layers.1.mlp.down_proj.weight"])
    else:
        assert tensors["model.norm.weight"].equal((mean("model.norm.weight").double() + 1).bfloat16())


def test_two_runs_give_the_same_bytes(source: Any, tmp_path: Path) -> None:
    dense, _ = source("qwen2")
    files = [write_upcycled(tmp_path / name, upcycled(dense)) / "model.safetensors" for name in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_no_entry_of_the_dense_family_is_left_to_mean_something_else(source: Any) -> None:
    for family, stale in (("qwen3", "max_window_layers"), ("gemma", "hidden_activation"), ("llama", "mlp_bias")):
        dense, _ = source(family)
        assert stale in {**dense.checkpoint.config, "hidden_activation": None}
        assert stale not in upcycled(dense).config()


def test_the_source_is_not_changed(source: Any) -> None:
    dense, _ = source("llama")
    before = json.dumps(dense.checkpoint.config)
    upcycled(dense).config()["rope_parameters"]["rope_theta"] = 1.0
    assert json.dumps(dense.checkpoint.config) == before
