"""Every command on checkpoints that other tools have quantized: what it makes of the matrices they stand for."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import config_of, load_whole, tensors_of, weights
from derived_families import DERIVED
from safetensors.torch import load_file
from stored_bits import FILE, rewrite, save_fp8, save_mxfp4
from stored_mlx import save_mlx
from stored_words import save_awq, save_bitsandbytes, save_gptq, save_nvfp4

from moetool.checkpoint.reader import Checkpoint

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def plain_copy(path: Path, target: Path) -> Path:
    """The matrices that a checkpoint stands for, as an ordinary one."""
    shown = Checkpoint.open(path)
    rewrite(path, target, {name: shown.read(name) for name in shown.tensors}, {})
    config = config_of(target)
    for key in ("quantization", "quantization_config"):  # mlx-lm has both, or none
        config.pop(key, None)
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def pair(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """`pair(family)`: a model in FP8, gpt-oss in MXFP4, and the same numbers in bf16."""
    root, made = tmp_path_factory.mktemp("stored"), {}

    def make(family: str) -> tuple[Path, Path]:
        if family not in made:
            own = {**DERIVED.get(family, {}), **({"intermediate_size": 64} if family == "gpt_oss" else {})}
            source = save_model(families.build(family, dtype=torch.bfloat16, **own), root / f"{family}-source")
            save = save_mxfp4 if family == "gpt_oss" else save_fp8
            stored = save(source, root / f"{family}-stored")
            made[family] = stored, plain_copy(stored, root / f"{family}-bf16")
        return made[family]

    return make


def run(run_cli: Any, *arguments: object) -> Any:
    result = run_cli(*arguments, "--json")
    assert result.code == 0, result.stderr
    return result.json


@pytest.mark.parametrize(
    ("family", "job"),
    [
        ("deepseek_v3", ("compress", "--rank", 4, "--method", "d2moe")),
        ("mixtral", ("compress", "--method", "quantize", "--bits", 4)),
        ("qwen3_moe", ("compress", "--method", "reap", "--experts", 3)),
        ("deepseek_v3", ("export", "--format", "dense-experts")),
        ("gpt_oss", ("compress", "--method", "quantize", "--bits", 3)),
        ("gpt_oss", ("compress", "--method", "reap", "--experts", 4)),
        ("gpt_oss", ("export", "--format", "dense-experts")),
    ],
    ids=["d2moe", "quantize", "reap", "dense-experts", "mxfp4-quantize", "mxfp4-reap", "mxfp4-dense-experts"],
)
def test_a_job_makes_what_it_makes_of_the_decoded_model(
    run_cli: Any,
    pair: Callable[[str], tuple[Path, Path]],
    calibration: tuple[object, ...],
    tmp_path: Path,
    family: str,
    job: tuple[object, ...],
) -> None:
    stored, plain = pair(family)
    command, *options = job
    text = () if command == "export" else calibration
    options += [] if command == "export" else ["--no-keep-stored"]
    run(run_cli, command, stored, tmp_path / "one", *options, *text)
    if command == "export":
        assert {name: own.tolist() for name, own in tensors_of(tmp_path / "one").items()} == {
            name: own.tolist() for name, own in tensors_of(plain).items()
        }
    else:
        run(run_cli, command, plain, tmp_path / "other", *options, *text)
        assert weights(tmp_path / "one") == weights(tmp_path / "other")
    config = config_of(tmp_path / "one")
    assert config.get("quantization_config", {"quant_method": "moetool"})["quant_method"] == "moetool"
    load_whole(tmp_path / "one")
    verified = run(run_cli, "verify", tmp_path / "one", "--against", stored)
    assert (verified["same_tensors"] > 0) == ("reap" not in job)  # a result of fewer experts has another shape


@pytest.mark.parametrize(
    ("family", "save"),
    [
        ("mixtral", save_gptq),
        ("qwen3_moe", save_awq),
        ("mixtral", save_bitsandbytes),
        ("deepseek_v3", save_nvfp4),
        ("deepseek_v3", save_mlx),
        ("gpt_oss", save_mlx),
        ("mixtral", partial(save_mlx, bits=None)),
    ],
    ids=["gptq", "awq", "bitsandbytes", "nvfp4", "mlx", "mlx-in-one-tensor", "mlx-in-16-bits"],
)
def test_other_formats(
    run_cli: Any,
    save_model: Any,
    tmp_path: Path,
    calibration: tuple[object, ...],
    tiny_text: Path,
    family: str,
    save: Callable[..., Path],
) -> None:
    own = DERIVED.get(family, {})
    source = save_model(families.build(family, dtype=torch.bfloat16, **own), tmp_path / "source")
    stored = save(source, tmp_path / "stored")
    (stored / "quantize_config.json").write_text("{}")
    plain = plain_copy(stored, tmp_path / "plain")
    for path in (stored, plain):
        job = ("--method", "quantize", "--bits", 4, "--no-keep-stored", *calibration)
        run(run_cli, "compress", path, tmp_path / f"{path.name}-4", *job)
    assert weights(tmp_path / "stored-4") == weights(tmp_path / "plain-4")
    run(run_cli, "export", stored, tmp_path / "dense", "--format", "dense-experts")
    assert {name: own.tolist() for name, own in tensors_of(tmp_path / "dense").items()} == {
        name: own.tolist() for name, own in tensors_of(plain).items()
    }
    for made in ("stored-4", "dense"):
        load_whole(tmp_path / made)
        assert not (tmp_path / made / "quantize_config.json").exists()
    told = run(
        run_cli, "eval", stored, "--against", plain, "--data", tiny_text, "--windows", 2, "--sequence-length", 32
    )
    assert told["against"]["kl"] == 0
    assert run(run_cli, "verify", tmp_path / "stored-4", "--against", stored)["same_tensors"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_measured_is_that_of_the_decoded_model(
    run_cli: Any, pair: Callable[[str], tuple[Path, Path]], tiny_text: Path, family: str
) -> None:
    stored, plain = pair(family)
    text = ("--data", tiny_text, "--windows", 4, "--sequence-length", 32)
    told = run(run_cli, "eval", stored, "--against", plain, *text)
    assert told["against"]["kl"] == 0
    assert told["against"]["nll"] == told["nll"]
    one, other = (run(run_cli, "routing", path, *text) for path in (stored, plain))
    assert {**one, "model": None, "path": None} == {**other, "model": None, "path": None}
    spoken = [run(run_cli, "generate", path, "a", "--max-new-tokens", 4) for path in (stored, plain)]
    assert spoken[0]["text"] == spoken[1]["text"]
    assert run(run_cli, "verify", stored, "--against", plain)["tensors"] == len(Checkpoint.open(plain).tensors)


def test_a_plan_says_of_what_a_ratio_is(
    run_cli: Any, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path, calibration: tuple[object, ...]
) -> None:
    stored, plain = pair("mixtral")
    job = ("compress", stored, tmp_path / "out", "--method", "d2moe", *calibration, "--ratio", 0.1, "--dry-run")
    plan = run(run_cli, *job, "--no-keep-stored")
    opened = Checkpoint.open(plain)
    beside = sum(info.nbytes for name, info in opened.tensors.items() if "self_attn" in name)
    assert plan["original_bytes"] == plan["input_bytes"] == (stored / "model.safetensors").stat().st_size
    assert plan["decoded_bytes"] == opened.shown_bytes
    scales = 4 * beside // 2 // 64
    told = f"matrices beside the experts are written in bfloat16, {(beside // 2 - scales) / 1000:.1f} kB more"
    assert plan["stored_as"] == f"FP8 in blocks of 8 × 8; {told}"
    told = "matrices beside the experts stay as they are stored"
    assert run(run_cli, *job)["stored_as"] == f"FP8 in blocks of 8 × 8; {told}"
    refused = run_cli("compress", stored, "--method", "d2moe", tmp_path / "out", *calibration, "--ratio", 0.9)
    assert refused.code == 2
    assert "kB in FP8 in blocks of 8 × 8, " in refused.stderr
    inspected = run_cli("inspect", stored)
    assert "kB in 1 file, stored in FP8 in blocks of 8 × 8" in inspected.stdout
    assert run(run_cli, "inspect", stored)["stored_as"] == "FP8 in blocks of 8 × 8"
    assert run(run_cli, "inspect", plain)["stored_as"] is None


def test_a_result_that_is_no_smaller_than_what_is_stored_is_told(
    run_cli: Any, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    job = ("compress", pair("mixtral")[0], tmp_path / "out", "--method", "quantize", "--group-size", 8)
    plan = run_cli(*job, "--bits", 8, "--dry-run", "--json").json
    assert plan["output_bytes"] > plan["input_bytes"]
    assert "nothing is saved" in plan["note"]
    assert "nothing is saved" not in run_cli(*job, "--bits", 2, "--dry-run", "--json").json["note"]
    made = run_cli(*job, "--bits", 8)
    assert made.code == 0, made.stderr
    assert "nothing is saved" in made.stderr


def test_a_plan_from_the_config_alone(
    run_cli: Any, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path, calibration: tuple[object, ...]
) -> None:
    stored, _ = pair("mixtral")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_bytes((stored / "config.json").read_bytes())
    job = ("compress", *calibration, "--method", "quantize", "--bits", 4, "--dry-run")
    told, known = (run(run_cli, job[0], path, tmp_path / "out", *job[1:]) for path in (tmp_path / "config", stored))
    assert told["headers"] == "config.json alone"
    assert told["stored_as"] == "fp8; matrices beside the experts stay as they are stored"
    assert told["decoded_bytes"] == known["decoded_bytes"]
    held = sum(info.nbytes for info in Checkpoint.open(stored).on_disk.values())
    assert told["input_bytes"] == pytest.approx(held, rel=0.001)
    assert told["output_bytes"] == pytest.approx(known["output_bytes"], rel=0.03)  # but for headers
    job += ("--no-keep-stored",)
    told, known = (run(run_cli, job[0], path, tmp_path / "out", *job[1:]) for path in (tmp_path / "config", stored))
    assert told["output_bytes"] == known["output_bytes"]


def test_a_missing_expert_is_told_before_a_job_begins(
    run_cli: Any, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    stored, _ = pair("mixtral")
    held = load_file(stored / FILE)
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    kept = {name: own for name, own in held.items() if not name.startswith(lost)}
    broken = rewrite(stored, tmp_path / "broken", kept, config_of(stored)["quantization_config"])
    result = run_cli("compress", broken, "--method", "d2moe", tmp_path / "out", "--ratio", 0.1)
    assert result.code == 3
    assert f"has no tensor {lost}" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_dense_model_in_fp8(
    run_cli: Any, dense: Callable[..., Path], tmp_path: Path, calibration: tuple[object, ...]
) -> None:
    stored = save_fp8(dense("qwen3", dtype=torch.bfloat16), tmp_path / "fp8")
    plain = plain_copy(stored, tmp_path / "bf16")
    for job in (("upcycle", "--experts", 4), ("moefy", "--experts", 4, "--keep", 0.5, *calibration)):
        command, *options = job
        for path in (stored, plain):
            run(run_cli, command, path, tmp_path / command / path.name, *options)
        made = [tmp_path / command / name for name in ("fp8", "bf16")]
        assert weights(made[0]) == weights(made[1])
        assert config_of(made[0]) == config_of(made[1])
        load_whole(made[0])


def test_tuning_a_model_in_fp8(
    run_cli: Any, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path, tiny_text: Path
) -> None:
    for path in pair("mixtral"):
        options = ("--data", tiny_text, "--steps", 1, "--sequence-length", 32, "--train", "experts")
        plan = run(run_cli, "tune", path, tmp_path / path.name, *options, "--dry-run")
        run(run_cli, "tune", path, tmp_path / path.name, *options)
        made = Checkpoint.open(tmp_path / path.name)
        assert made.stored_as is None
        assert plan["output_bytes"] == pytest.approx(made.weight_bytes, rel=0.1)
    one, other = (weights(tmp_path / path.name) for path in pair("mixtral"))
    assert one == other
