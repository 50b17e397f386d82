"""`export --format mlx`: names, bytes and entry of the format, numbers of all matrices, and what mlx-lm computes."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import WEIGHTS, CrashDriver, change_tensors, config_of, logits, relative_error, weight_bytes
from derived_families import DERIVED
from families import FAMILIES, build
from mlx_exports import decoded, export, put_back
from safetensors.torch import load_file
from sampling import sampled
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.format.mlx import EXPERTS_IN
from moetool.job.job import Source

HUB: dict[str, dict[str, Any]] = {  # what the hub's configs have and transformers does not write
    "deepseek_v2": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 32,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    },
    "dots1": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "exaone_moe": {"is_moe_layer": [True, False, True]},
    "lfm2_moe": {"tie_word_embeddings": True},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "minimax_m2": {"rotary_dim": 8, "shared_intermediate_size": 0, "scoring_func": "sigmoid"},
    "qwen2_moe": {"mlp_only_layers": []},
    "solar_open": {"intermediate_size": 64, "first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
}


RUN = """
import sys
from pathlib import Path
import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
mx.set_default_device(mx.cpu)
model, _ = load_model(Path(sys.argv[1]))
model.set_dtype(mx.float32)
logits = model(mx.array(np.load(sys.argv[2])))
np.save(Path(sys.argv[1]) / "logits.npy", np.array(logits.astype(mx.float32)))
"""


def wide(family: str, **more: Any) -> Any:
    """A model whose matrices are cut into whole groups of 32 inputs."""
    own = {**FAMILIES.get(family, DERIVED.get(family, {})), **HUB.get(family, {})}
    widths = {key: 32 * -(-own[key] // 32) for key in own if key.endswith(("intermediate_size", "ffn_hidden_size"))}
    return build(family, **{**own, **widths, "hidden_size": 64, **more})


def in_mlx(path: Path, tokens: Tensor) -> Tensor:
    """Logits of a result, in a process of its own: MLX's libraries bring another OpenMP."""
    if importlib.util.find_spec("mlx_lm") is None:
        pytest.skip("mlx-lm is not installed: pip install mlx-lm 'mlx[cpu]'")
    np.save(path.parent / "tokens.npy", tokens.numpy())
    command = [sys.executable, "-c", RUN, path, path.parent / "tokens.npy"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return torch.from_numpy(np.load(path / "logits.npy"))


@pytest.fixture(scope="module")
def model(make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_mixtral(hidden_size=64, intermediate_size=64), tmp_path_factory.mktemp("mlx") / "model")


@pytest.mark.parametrize(("bits", "most"), [(2, 0.35), (3, 0.17), (4, 0.09), (5, 0.05), (6, 0.025), (8, 0.007)])
def test_all_matrices_are_packed_and_the_rest_is_as_it_was(
    run_cli: Any, model: Path, tmp_path: Path, bits: int, most: float
) -> None:
    plan = export(run_cli, model, tmp_path / "none", "--bits", bits, "--dry-run", "--json")
    result = export(run_cli, model, tmp_path / "out", "--bits", bits, "--json")
    assert result.code == 0, result.stderr
    assert plan.json["output_bytes"] == weight_bytes(tmp_path / "out") == result.json["bytes_after"]
    before, after = load_file(model / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    reader = Source.open(model).experts
    for layer in reader.moe_layers:
        for role in reader.shape.roles:
            found = decoded(tmp_path / "out", f"model.layers.{layer}.block_sparse_moe.switch_mlp.{role}_proj")
            for expert in range(reader.shape.experts):
                assert relative_error(found[expert], reader.dense(layer, expert, role)) < most
    packed = {name.removesuffix(".scales") for name in after if name.endswith(".scales")}
    for name in (name for name in before if ".experts." not in name):
        module = name.removesuffix(".weight")
        assert (module in packed) == (before[name].ndim == 2 and ".gate." not in name)
        if module in packed:
            assert relative_error(decoded(tmp_path / "out", module), before[name]) < 0.01
        else:
            assert after[name].equal(before[name])
    assert not [name for name in after if ".experts." in name]


def test_other_matrices_may_stay(run_cli: Any, model: Path, tmp_path: Path) -> None:
    assert export(run_cli, model, tmp_path / "out", "--other-bits", 16).code == 0
    before, after = load_file(model / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert all(after[name].equal(tensor) for name, tensor in before.items() if ".experts." not in name)
    assert config_of(tmp_path / "out")["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}


def test_other_matrices_may_have_fewer_bits(run_cli: Any, model: Path, tmp_path: Path) -> None:
    result = export(run_cli, model, tmp_path / "out", "--bits", 3, "--other-bits", 6, "--json")
    assert result.code == 0, result.stderr
    before, entry = load_file(model / WEIGHTS), config_of(tmp_path / "out")["quantization"]
    module = "model.layers.0.self_attn.q_proj"
    assert (entry["bits"], entry[module]) == (3, {"group_size": 32, "bits": 6})
    assert relative_error(decoded(tmp_path / "out", module), before[f"{module}.weight"]) < 0.025


def test_the_config_says_outright_what_mlx_lm_asks_for(run_cli: Any, model: Path, tmp_path: Path) -> None:
    assert export(run_cli, model, tmp_path / "out").code == 0
    before, after = config_of(model), config_of(tmp_path / "out")
    assert "rope_theta" not in before
    assert after["rope_theta"] == before["rope_parameters"]["rope_theta"]
    assert after["rope_scaling"] is None
    assert after["quantization"] == after["quantization_config"]


@pytest.mark.parametrize("bits", [("--bits", 2), ("--bits", 8, "--other-bits", 4)])
def test_a_text_makes_codes_that_lose_less(
    run_cli: Any, calibration: Any, model: Path, tiny_tokens: Tensor, tmp_path: Path, bits: tuple[object, ...]
) -> None:
    """Of experts, and of attention, embeddings and head."""
    tokens = tiny_tokens[1000:1256].view(4, 64)
    expected, lost = logits(model, tokens), {}
    for name, text in (("nearest", ()), ("chosen", calibration)):
        result = export(run_cli, model, tmp_path / name, *bits, *text)
        assert result.code == 0, result.stderr
        assert config_of(tmp_path / name) == config_of(tmp_path / "nearest")
        shown = put_back(model, tmp_path / name, tmp_path / f"{name}-dense")
        lost[name] = relative_error(logits(shown, tokens), expected)
    assert lost["chosen"] < 0.95 * lost["nearest"]


def test_killed_runs_resume_to_the_same_bytes(
    crash: CrashDriver, calibration: Any, model: Path, tmp_path: Path
) -> None:
    arguments = ("export", model, "--format", "mlx", "--group-size", 32, *calibration, "--shard-size", "20kB")
    crash.whole(tmp_path / "whole", arguments)
    crash.goes_on(tmp_path / "out", arguments, 25, tmp_path / "whole")


def test_a_shared_expert_on_the_base_is_packed_as_any(run_cli: Any, save_model: Any, tmp_path: Path) -> None:
    widths = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    source = save_model(build("qwen2_moe", mlp_only_layers=[], **widths), tmp_path / "model")
    options = ("--method", "ders-quantize", "--bits", 4, "--shared-expert", "--group-size", 32)
    made = run_cli("compress", source, tmp_path / "small", *options)
    assert made.code == 0, made.stderr
    result = export(run_cli, tmp_path / "small", tmp_path / "out", "--bits", 8)
    assert result.code == 0, result.stderr
    assert run_cli("export", tmp_path / "small", tmp_path / "dense").code == 0
    dense = load_file(tmp_path / "dense" / WEIGHTS)
    shared = [name.removesuffix(".weight") for name in dense if ".shared_expert." in name]
    assert shared
    assert all(relative_error(decoded(tmp_path / "out", name), dense[f"{name}.weight"]) < 0.02 for name in shared)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--bits", 7), 2, ["2, 3, 4, 5, 6, 8", "not 7"]),
        (("--group-size", 48), 2, ["--group-size"]),
        (("--group-size", 128), 2, ["Groups of 128", "--group-size 64"]),
    ],
)
def test_what_does_not_fit_is_refused(
    run_cli: Any, model: Path, tmp_path: Path, options: tuple[object, ...], code: int, says: list[str]
) -> None:
    result = run_cli("export", model, tmp_path / "out", "--format", "mlx", *options)
    assert result.code == code, result.stderr
    assert all(part in result.stderr for part in says), result.stderr
    assert not (tmp_path / "out").exists()


def test_other_families_are_refused(run_cli: Any, save_model: Any, tmp_path: Path) -> None:
    result = export(run_cli, save_model(build("flex_olmo"), tmp_path / "model"), tmp_path / "out")
    assert result.code == 3
    assert "'flex_olmo' is not among the families" in result.stderr


@pytest.mark.parametrize(
    ("family", "more", "says"),
    [
        ("lfm2_moe", {"tie_word_embeddings": False}, "has one of its own"),
        ("qwen2_moe", {"tie_word_embeddings": True}, "mlx-lm wants a head for 'qwen2_moe'"),
        ("qwen3_next", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "every 1th alone"),
    ],
)
def test_what_mlx_lm_has_no_words_for_is_refused(
    run_cli: Any, save_model: Any, tmp_path: Path, family: str, more: dict[str, Any], says: str
) -> None:
    result = export(run_cli, save_model(build(family, **more), tmp_path / "model"), tmp_path / "out", "--dry-run")
    assert result.code == 3
    assert says in result.stderr


def test_an_export_is_verified_and_read_again(run_cli: Any, model: Path, tmp_path: Path) -> None:
    result = export(run_cli, model, tmp_path / "out")
    assert "mlx_lm.chat" in (tmp_path / "out" / "README.md").read_text()
    assert re.search(r"next: (mlx_lm.generate --model|moetool verify) ", result.stderr)
    assert run_cli("verify", tmp_path / "out").code == 0
    read = run_cli("inspect", tmp_path / "out")
    assert read.code == 0, read.stderr
    assert "stored in MLX (4 bits in groups of 32, 8 bits in groups of 32)" in read.stdout
    shown = Checkpoint.open(tmp_path / "out")
    assert shown.shapes == Checkpoint.open(model).shapes
    up = "model.layers.0.block_sparse_moe"
    assert shown.read(f"{up}.experts.2.w3.weight").equal(decoded(tmp_path / "out", f"{up}.switch_mlp.up_proj")[2])


@pytest.mark.parametrize(
    "family", sampled(sorted(EXPERTS_IN), ["afmoe", "deepseek_v3", "gpt_oss", "lfm2_moe", "mixtral", "qwen3_next"])
)
def test_mlx_lm_computes_what_transformers_does(
    run_cli: Any, save_model: Any, calibration: Any, tmp_path: Path, family: str
) -> None:
    source = save_model(wide(family), tmp_path / "model")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, 280, (1, 40)))
    expected = logits(source, tokens).float().log_softmax(-1)
    bits = ("--bits", 8, "--other-bits")
    for name, options, most in (
        ("others as they are", (*bits, 16), 0.06),
        ("all", (*bits, 8), 0.25),
        ("chosen", ("--target-bpw", 9, *calibration), 0.25),
    ):
        out = tmp_path / name
        result = export(run_cli, source, out, *options)
        assert result.code == 0, result.stderr
        found = in_mlx(out, tokens).log_softmax(-1)[..., : expected.shape[-1]]
        assert (found - expected).norm() < most * (expected - expected.mean(-1, keepdim=True)).norm()


@pytest.mark.parametrize("family", sampled(["granitemoe", "mixtral", "qwen3_next"], ["mixtral"]))
@pytest.mark.parametrize("is_other", [False, True])
def test_a_head_beside_embeddings_that_are_said_to_be_it(
    run_cli: Any, save_model: Any, tmp_path: Path, family: str, is_other: bool
) -> None:
    """mlx-lm leaves out such a head, or stumbles over it, where transformers takes it."""

    def add(tensors: dict[str, Tensor]) -> None:
        embeddings = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embeddings.roll(1, 0) if is_other else embeddings.clone()

    source = change_tensors(save_model(wide(family, tie_word_embeddings=True), tmp_path / "model"), add)
    result = export(run_cli, source, tmp_path / "out", "--bits", 8)
    assert result.code == 0, result.stderr
    assert config_of(source)["tie_word_embeddings"] is True
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    own = load_file(source / WEIGHTS)["lm_head.weight"]
    assert relative_error(decoded(tmp_path / "out", "lm_head"), own) < 0.01
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, 280, (1, 40)))
    expected = logits(source, tokens).log_softmax(-1)
    found = in_mlx(tmp_path / "out", tokens).log_softmax(-1)
    assert (found - expected).norm() < 0.25 * (expected - expected.mean(-1, keepdim=True)).norm()
