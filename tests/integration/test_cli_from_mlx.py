"""Checkpoints that mlx-lm itself converts, as inputs: tensors of every family, numbers of every format, its logits."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from around_families import AROUND
from checkpoints import config_of, relative_error
from dense_families import build_dense
from derived_families import DERIVED
from safetensors.torch import load_file, save_file
from sampling import sampled
from stored_bits import FILE, save_mxfp4
from test_cli_mlx import HUB

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import settings_of
from moetool.format.mlx import EXPERTS_IN, told_outright
from moetool.job.blueprint import check_against_config
from moetool.runtime.loading import load_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed: pip install mlx-lm 'mlx[cpu]'"
)
MLA = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
MAMBA = {"layer_types": ["mamba", "attention", "mamba"]}

# What mlx-lm asks of a config, as the hub's have it, beside what the export writes. Values that a model is built with
# are in the second.
MOE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{family: ({}, {}) for family in sorted(EXPERTS_IN)},
    "deepseek_v32": ({}, {}),
    "gemma4_text": (
        {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        {"tie_word_embeddings": True},
    ),
    "glm4_moe_lite": ({}, {}),
    "glm_moe_dsa": (MLA, {}),
    "granitemoehybrid": (MAMBA, {"mamba_d_head": 32}),
    "jamba": ({}, {}),
    "kimi_linear": (
        {
            "rope_theta": 1e4,
            "moe_layer_freq": 1,
            "linear_attn_config": {
                "kda_layers": [1, 3],
                "full_attn_layers": [2],
                "num_heads": 2,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
            },
        },
        {"q_lora_rank": None},
    ),
    "laguna": ({}, {}),
    "lfm2_moe": ({}, {"tie_word_embeddings": True}),
    "mellum": ({}, {}),
    "mistral4": ({}, {}),
    "nemotron_h": ({}, {}),
    "qwen3_next": ({"full_attention_interval": 3}, {}),
}
# Of these mlx-lm computes something else than transformers, in 16 bits, too.
DIFFERING = ("deepseek_v32", "glm_moe_dsa", "gpt_oss", "granitemoehybrid", "jamba")
DENSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "apertus": ({"mlp_bias": False, "post_norm": False, "qk_norm": True}, {}),
    "gpt2": ({"n_ctx": 128}, {"n_inner": 256}),
    "gpt_neox": ({"rotary_emb_base": 10000, "rotary_pct": 0.25}, {"intermediate_size": 256}),
    "gptj": ({}, {"n_inner": 256}),
    "granitemoehybrid": (MAMBA, {"mamba_d_head": 32}),
    "lfm2": (
        {"block_dim": 64, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "block_ff_dim": 48},
        {"tie_word_embeddings": True},
    ),
    "llama": ({}, {}),
    "phi3": ({}, {}),
    "starcoder2": ({}, {}),
}
WITHIN: dict[str, dict[str, Any]] = {  # whose language models lie in others
    "llama4": {},
    "minimax_m3_vl": {"rotary_dim": 4},
    "qwen3_5_moe": {"full_attention_interval": 3},
    "qwen3_vl_moe": {"norm_topk_prob": True},
}
FORMATS: dict[str, dict[str, Any]] = {
    "2 bits": {"q_bits": 2, "q_group_size": 64},
    "3 bits": {"q_bits": 3, "q_group_size": 32},
    "4 bits": {"q_bits": 4, "q_group_size": 32},
    "5 bits": {"q_bits": 5, "q_group_size": 64},
    "6 bits": {"q_bits": 6, "q_group_size": 32},
    "8 bits": {"q_bits": 8, "q_group_size": 64},
    "mixed": {"q_bits": 4, "q_group_size": 32, "quant_predicate": "mixed_2_6"},
    "mxfp4": {"q_mode": "mxfp4"},
    "mxfp8": {"q_mode": "mxfp8"},
    "nvfp4": {"q_mode": "nvfp4"},
}
RUN = """
import json, sys
from pathlib import Path
import mlx.core as mx
import numpy as np
from mlx_lm.convert import convert
from mlx_lm.utils import dequantize_model, load_model
mx.set_default_device(mx.cpu)
source, target, tokens, options = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
convert(str(source), str(target), quantize=bool(options), **options)
model, config = load_model(target)
held = {}
for name, own in mx.load(str(target / "model.safetensors")).items():
    if name.endswith(".scales"):
        module, said = name.removesuffix(".scales"), config["quantization"]
        said = said.get(module, said)
        parts = [mx.load(str(target / "model.safetensors")).get(f"{module}.{part}") for part in ("weight", "biases")]
        numbers = {key: said[key] for key in ("group_size", "bits")}
        held[module] = mx.dequantize(parts[0], own, parts[1], mode=said.get("mode", "affine"), **numbers)
mx.save_safetensors(str(target.parent / "dequantized.safetensors"), held)
model = dequantize_model(model)
model.set_dtype(mx.float32)
np.save(target.parent / "logits.npy", np.array(model(mx.array(np.load(tokens))).astype(mx.float32)))
"""


def wide(own: dict[str, Any]) -> dict[str, Any]:
    """Widths of experts that groups of 32 inputs divide."""
    ends = ("intermediate_size", "ffn_hidden_size")
    return {key: 32 * -(-own[key] // 32) if key.endswith(ends) and type(own[key]) is int else own[key] for key in own}


def for_mlx(path: Path, said: dict[str, Any]) -> Path:
    """A checkpoint whose config says outright what mlx-lm asks for."""
    config = config_of(path)
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = {**text, **told_outright(settings_of(text, path)), **said}
    else:
        config = {**config, **told_outright(settings_of(config, path)), **said}
    (path / "config.json").write_text(json.dumps({**config, "torch_dtype": config["dtype"]}))
    return path


def converted(source: Path, target: Path, **options: Any) -> Path:
    """What mlx-lm makes of a checkpoint, in a process of its own: its libraries bring another OpenMP."""
    tokens = target.parent / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(1, 280, (1, 24)))
    arguments = (source, target, tokens, json.dumps(options))
    ran = subprocess.run([sys.executable, "-c", RUN, *map(str, arguments)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return target


def check_logits(path: Path) -> None:
    """The model that is read computes what mlx-lm does with its dequantized weights."""
    opened = Checkpoint.open(path)
    check_against_config(opened)
    tokens = torch.from_numpy(np.load(path.parent / "tokens.npy"))
    with torch.no_grad():
        found = load_model(opened, torch.float32)(tokens).logits.log_softmax(-1)
    expected = torch.from_numpy(np.load(path.parent / "logits.npy"))[..., : found.shape[-1]].log_softmax(-1)
    assert (found - expected).norm() < 1e-3 * (expected - expected.mean(-1, keepdim=True)).norm()


def check_same(path: Path, source: Path) -> None:
    """All tensors are the source's, but for what norms have lost with the one that mlx-lm has added."""
    shown, plain = Checkpoint.open(path), Checkpoint.open(source)
    check_against_config(shown)
    assert shown.shapes == plain.shapes
    for name in plain.tensors:
        found, expected = shown.read(name), plain.read(name)
        if "norm" in name and shown.config["model_type"] in ("qwen3_next",):
            assert relative_error(found, expected) < 0.01, name
        else:
            assert found.equal(expected), name


@pytest.mark.parametrize("family", sampled(MOE, ["kimi_linear", "laguna", "mixtral", "qwen3_next"]))
def test_tensors_of_families(save_model: Any, tmp_path: Path, family: str) -> None:
    said, own = MOE[family]
    hub = HUB.get(family, {})
    widths = wide({**families.FAMILIES.get(family, {}), **DERIVED.get(family, {}), **hub, **own})
    model = families.build(family, dtype=torch.bfloat16, **{"hidden_size": 64, **widths})
    source = for_mlx(save_model(model, tmp_path / "source"), {**hub, **said})
    for_it = source
    if family == "kimi_linear":  # as its first layer, a dense one, has it on the hub
        for_it = renamed(source, tmp_path / "hub", lambda name: name.replace(".0.block_sparse_moe.", ".0.mlp."))
    check_same(converted(for_it, tmp_path / "plain"), source)
    if family not in DIFFERING:
        check_logits(converted(for_it, tmp_path / "coded", q_bits=4, q_group_size=32))


@pytest.mark.parametrize("family", sampled(DENSE, ["gpt2", "granitemoehybrid"]))
def test_tensors_of_dense_families(save_model: Any, tmp_path: Path, family: str) -> None:
    said, own = DENSE[family]
    model = build_dense(family, dtype=torch.bfloat16, **{"hidden_size": 64, **own})
    source = for_mlx(save_model(model, tmp_path / "source"), said)
    for_it = source
    if family == "gpt2":  # as the hub has it
        for_it = renamed(source, tmp_path / "hub", lambda name: name.removeprefix("transformer."))
    check_same(converted(for_it, tmp_path / "plain"), source)
    if family not in DIFFERING:
        check_logits(converted(for_it, tmp_path / "coded", q_bits=4, q_group_size=32))


def renamed(source: Path, target: Path, name: Callable[[str], str]) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file({name(own): tensor for own, tensor in load_file(source / FILE).items()}, target / FILE, {"format": "pt"})
    return target


def hubs_experts(path: Path, family: str) -> None:
    """Experts of a layer in one tensor, as the hub has them of these two families, and transformers does not save."""
    held = load_file(path / FILE)
    if family == "qwen3_vl_moe":
        held = {name: own.mT.contiguous() if ".experts." in name else own for name, own in held.items()}
    if family == "qwen3_5_moe":
        for block in sorted({name.split(".experts.")[0] for name in held if ".experts." in name}):
            count = sum(name.startswith(f"{block}.experts.") and "up_proj" in name for name in held)
            role = {
                part: torch.stack([held.pop(f"{block}.experts.{one}.{part}.weight") for one in range(count)])
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            held[f"{block}.experts.gate_up_proj"] = torch.cat([role["gate_proj"], role["up_proj"]], 1)
            held[f"{block}.experts.down_proj"] = role["down_proj"]
    save_file(held, path / FILE, {"format": "pt"})


@pytest.mark.parametrize("family", sampled(WITHIN, ["qwen3_5_moe"]))
def test_language_models_within_others(run_cli: Any, save_model: Any, tmp_path: Path, family: str) -> None:
    source = save_model(families.build(family, **AROUND[family]), tmp_path / "source")
    hubs_experts(for_mlx(source, WITHIN[family]), family)
    path = converted(source, tmp_path / "plain")
    told = run_cli("inspect", path)
    assert told.code == 0, told.stderr
    assert f"MLX, in 16 bits or more, the language model of {family} alone" in told.stdout
    if family == "minimax_m3_vl":  # which mlx-lm computes otherwise
        tokens, computed = torch.from_numpy(np.load(tmp_path / "tokens.npy")), []
        for own in (path, source):
            with torch.no_grad():
                computed.append(load_model(Checkpoint.open(own), torch.float32)(tokens).logits)
        assert computed[0].equal(computed[1])
    else:
        check_logits(path)


@pytest.mark.parametrize("form", sampled(FORMATS, ["3 bits", "mixed", "nvfp4"]))
def test_numbers_are_those_of_mlx(save_model: Any, tmp_path: Path, form: str) -> None:
    """Bit for bit, of every tensor of a Mixtral, some of whose modules have bits of their own."""
    model = families.build("mixtral", dtype=torch.bfloat16, hidden_size=64, intermediate_size=64, num_hidden_layers=4)
    source = for_mlx(save_model(model, tmp_path / "source"), {})
    path = converted(source, tmp_path / "coded", **FORMATS[form])
    shown, roles = Checkpoint.open(path), {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    held = load_file(tmp_path / "dequantized.safetensors")
    assert len(held) == 4 * 8 + 2
    for module, expected in held.items():
        if ".switch_mlp." in module:
            block, role = module.split("switch_mlp.")
            names = [f"{block}experts.{expert}.{roles[role]}.weight" for expert in range(4)]
            assert torch.stack([shown.read(name) for name in names]).equal(expected)
        else:
            assert shown.read(f"{module}.weight").equal(expected)
    check_logits(path)


def test_gpt_oss_stays_in_mxfp4(save_model: Any, tmp_path: Path) -> None:
    own = {**DERIVED["gpt_oss"], "intermediate_size": 64, "hidden_size": 64}
    source = save_model(families.build("gpt_oss", dtype=torch.bfloat16, **own), tmp_path / "bf16")
    source = for_mlx(save_mxfp4(source, tmp_path / "source"), {})
    path = converted(source, tmp_path / "plain")
    check_same(path, source)
    assert Checkpoint.open(path).stored_as == "MLX (MXFP4)"


def test_an_export_of_ours_computes_what_mlx_lm_says(run_cli: Any, save_model: Any, tmp_path: Path) -> None:
    model = families.build("qwen3_moe", dtype=torch.bfloat16, hidden_size=64, moe_intermediate_size=32)
    source = save_model(model, tmp_path / "source")
    made = run_cli("export", source, tmp_path / "export", "--format", "mlx", "--group-size", 32, "--bits", 3)
    assert made.code == 0, made.stderr
    path = converted(tmp_path / "export", tmp_path / "coded")
    check_logits(path)
    shown, ours = Checkpoint.open(path), Checkpoint.open(tmp_path / "export")
    assert all(shown.read(name).equal(ours.read(name)) for name in ours.tensors)
