"""A dense checkpoint read by role, against transformers' own modules, and refusals of what does not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_families import DENSE_FAMILIES, build_dense
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from upcycled import open_dense, save_dense

from moetool.errors import InvalidInputError

FEATURES_OF = {
    "llama": (),
    "llama-rope-scaled": (),
    "llama-wide-heads": ("head_dim",),
    "llama-attention-bias": ("attention_bias",),
    "llama-mlp-bias": ("mlp_bias",),
    "mistral": ("sliding_window",),
    "qwen2": ("qkv_bias",),
    "qwen2-windows": ("qkv_bias", "mixed_attention"),
    "qwen3": ("head_norm", "head_dim"),
    "olmo2": ("query_norm",),
    "phi3": (),
    "phi3-longrope": (),
    "gemma": ("scaled_embedding",),
    "granite": ("multipliers",),
    "seed_oss": ("qkv_bias",),
    **dict.fromkeys(("gemma2", "gemma3", "olmo3", "cohere2", "exaone4"), ("own_block",)),
    **dict.fromkeys(("smollm3", "olmo", "cohere", "glm", "glm4", "ernie4_5", "hunyuan_v1_dense"), ("own_block",)),
    **dict.fromkeys(("gpt_neox", "phi", "gpt_bigcode", "starcoder2", "falcon"), ("own_block", "ungated")),
}
# What a config may say beyond those: what it turns on, and (None) what it does not.
VARIANTS: list[tuple[str, dict[str, Any], str | None]] = [
    ("mistral", {"sliding_window": None}, None),
    ("phi3", {"sliding_window": 8}, "sliding_window"),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, None),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding_window"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, None),
    ("olmo2", {"attention_bias": True}, "attention_bias"),
    ("gemma", {"head_dim": 16}, "head_dim"),
    ("granite", {"mlp_bias": True}, "mlp_bias"),
    ("phi3", {"partial_rotary_factor": 0.5}, "partial_rotary"),
    ("phi", {"partial_rotary_factor": 0.5}, None),
    ("seed_oss", {"attention_out_bias": True}, "own_block"),
    ("seed_oss", {"mlp_bias": True}, "mlp_bias"),
    ("seed_oss", {"head_dim": 16}, "head_dim"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("dense")

    def get(family: str) -> Path:
        return directory / family if (directory / family).exists() else save_dense(directory / family, family)

    return get


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_roles_are_what_the_model_computes(family: str, saved: Callable[[str], Path]) -> None:
    """Gate is what goes through the activation; a swap of gate and up would not change any shape."""
    dense = open_dense(saved(family))
    module = build_dense(family).get_submodule(dense.architecture.ffn_prefix(1).removesuffix("."))
    activation = next(getattr(module, name) for name in ("act_fn", "activation_fn", "act") if hasattr(module, name))
    rows = torch.randn(1, 7, dense.hidden, generator=torch.Generator().manual_seed(0))

    def linear(inputs: torch.Tensor, role: Any) -> torch.Tensor:
        assert dense.matrix(1, role).shape == dense.shape(role)
        return F.linear(inputs, dense.matrix(1, role), dense.bias(1, role) if role in dense.biases else None)

    with torch.no_grad():
        if "gate" in dense.architecture.roles:
            inner = activation(linear(rows, "gate")) * linear(rows, "up")
        else:
            inner = activation(linear(rows, "up"))
        torch.testing.assert_close(linear(inner, "down"), module(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_features(family: str, saved: Callable[[str], Path]) -> None:
    assert open_dense(saved(family)).features == FEATURES_OF[family]


@pytest.mark.parametrize(("family", "options", "feature"), VARIANTS)
def test_features_that_the_config_turns_on(
    family: str, options: dict[str, Any], feature: str | None, tmp_path: Path
) -> None:
    found = open_dense(save_dense(tmp_path / "dense", family, **options)).features
    usual = [name for name in FEATURES_OF[family] if name != "sliding_window"]
    assert found == (*usual, *([feature] if feature else []))


def test_numbers_of_the_model(saved: Callable[[str], Path]) -> None:
    dense = open_dense(saved("llama-wide-heads"))
    assert (dense.layers, dense.hidden, dense.intermediate, dense.head_dim) == (3, 32, 48, 16)
    assert dense.dtype == torch.float32
    assert [dense.shape(role) for role in ("gate", "up", "down")] == [(48, 32), (48, 32), (32, 48)]
    assert open_dense(saved("llama")).head_dim == 8
    prefix = "model.layers.1.mlp."
    assert dense.ffn_names(1) == {f"{prefix}{role}_proj.weight" for role in ("gate", "up", "down")}


def broken(source: Path, target: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Path:
    """A copy with other entries in its config, and with tensors replaced or removed."""
    shutil.copytree(source, target)
    entries = {**json.loads((target / "config.json").read_text()), **(config or {})}
    (target / "config.json").write_text(json.dumps(entries))
    stored = {**load_file(target / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_tensor_of_another_shape_or_none_is_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    told = r"2\.mlp\.up_proj\.weight of .*shape has shape \[48, 31\], .*0\.mlp\.down_proj\.weight promises \[48, 32\]"
    with pytest.raises(InvalidInputError, match=told):
        open_dense(broken(saved("llama"), tmp_path / "shape", **{name: torch.zeros(48, 31)}))
    with pytest.raises(InvalidInputError, match=r"has no tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        open_dense(broken(saved("llama"), tmp_path / "missing", **{name: None}))
    down = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(InvalidInputError, match=r"down_proj\.weight is no matrix: \[1536\]"):
        open_dense(broken(saved("llama"), tmp_path / "flat", **{down: torch.zeros(1536)}))
    joined = "model.layers.0.mlp.gate_up_proj.weight"
    with pytest.raises(InvalidInputError, match=r"has shape \[48, 32\], .* promises \[96, 32\]"):
        open_dense(broken(saved("phi3"), tmp_path / "half", **{joined: torch.zeros(48, 32)}))


@pytest.mark.parametrize("word", ["int8", "float8_e4m3fn"])
def test_numbers_of_fewer_than_16_bits_are_refused(saved: Callable[[str], Path], tmp_path: Path, word: str) -> None:
    """Before anything is written of them."""
    name = "model.layers.2.mlp.up_proj.weight"
    with pytest.raises(InvalidInputError, match=rf"{name} is stored as {word}, and config.json names no quantization"):
        open_dense(broken(saved("llama"), tmp_path / "narrow", **{name: torch.zeros(48, 32).to(getattr(torch, word))}))


def test_quantized_models_are_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"already quantized \(quant_method 'hqq'\)"):
        open_dense(broken(saved("llama"), tmp_path / "hqq", {"quantization_config": {"quant_method": "hqq"}}))


def test_a_config_that_transformers_cannot_read(saved: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"transformers cannot build the model .*broken/config\.json"):
        open_dense(broken(saved("llama"), tmp_path / "broken", {"use_cache": "many"}))
