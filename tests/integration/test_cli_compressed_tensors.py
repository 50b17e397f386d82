"""`export --format compressed-tensors`: names, bytes and entry of the format, and the numbers of the experts."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from around_families import AROUND
from checkpoints import (
    WEIGHTS,
    CrashDriver,
    change_tensors,
    check_packed_alike,
    config_of,
    copy_of,
    divergence,
    logits,
    relative_error,
    weight_bytes,
)
from derived_families import DERIVED
from families import FAMILIES, add_prediction_layer, build
from safetensors.torch import load_file
from sampling import MOE_STRUCTURES, sampled
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from moetool.costs.layer_memory import LayerMemory
from moetool.job.job import Source
from moetool.quiet import quiet

PARTS = ("weight_packed", "weight_scale", "weight_shape")
FUSED = {"granitemoe", "granitemoeshared"}
ONE_BY_ONE = sorted(set(FAMILIES) - FUSED)


def decoded(path: Path, module: str) -> Tensor:
    """A matrix from the three tensors of the format alone."""
    stored, scheme = load_file(path / WEIGHTS), config_of(path)["quantization_config"]["config_groups"]["experts"]
    bits, group = scheme["weights"]["num_bits"], scheme["weights"]["group_size"]
    words, scales, shape = (stored[f"{module}.{part}"] for part in PARTS)
    columns = int(shape[1])
    spread = (words.unsqueeze(2) >> torch.arange(32)) & 1
    ones = spread.flatten(1)[:, : columns * bits].view(-1, columns, bits)
    codes = (ones * 2 ** torch.arange(bits)).sum(2)
    return (codes - 2 ** (bits - 1)).float() * scales.float().repeat_interleave(group, 1)


def export(run_cli: Any, source: Path, target: Path, *options: object) -> Any:
    return run_cli("export", source, target, "--format", "compressed-tensors", *options)


@pytest.mark.parametrize(("bits", "most"), [(2, 0.35), (3, 0.17), (4, 0.09), (8, 0.01)])
def test_experts_are_packed_and_the_rest_is_as_it_was(
    run_cli: Any, tiny_mixtral_bf16: Path, tmp_path: Path, bits: int, most: float
) -> None:
    plan = export(
        run_cli, tiny_mixtral_bf16, tmp_path / "none", "--bits", bits, "--group-size", 16, "--dry-run", "--json"
    )
    result = export(run_cli, tiny_mixtral_bf16, tmp_path / "out", "--bits", bits, "--group-size", 16, "--json")
    assert result.code == 0, result.stderr
    assert plan.json["output_bytes"] == weight_bytes(tmp_path / "out") == result.json["bytes_after"]
    before, after = load_file(tiny_mixtral_bf16 / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    experts = {name.removesuffix(".weight") for name in before if ".experts." in name}
    assert set(after) == {f"{module}.{part}" for module in experts for part in PARTS} | {
        name for name in before if ".experts." not in name
    }
    assert all(torch.equal(after[name], before[name]) for name in after if name in before)
    for module in experts:
        rows, columns = before[f"{module}.weight"].shape
        packed, scale, shape = (after[f"{module}.{part}"] for part in PARTS)
        assert (packed.dtype, packed.shape) == (torch.int32, (rows, -(-columns * bits // 32)))
        assert (scale.dtype, scale.shape) == (torch.bfloat16, (rows, columns // 16))
        assert shape.tolist() == [rows, columns]
        own = before[f"{module}.weight"].float()
        assert (decoded(tmp_path / "out", module) - own).norm() < most * own.norm()


def test_a_compressed_model_is_decoded_first(run_cli: Any, small: Path, tmp_path: Path) -> None:
    """The nearest codes of what the compressed checkpoint stands for, not of what it came from."""
    result = export(run_cli, small, tmp_path / "out", "--bits", 8, "--group-size", 16)
    assert result.code == 0, result.stderr
    assert run_cli("export", small, tmp_path / "dense").code == 0
    dense = load_file(tmp_path / "dense" / WEIGHTS)
    entry = config_of(tmp_path / "out")["quantization_config"]
    assert (entry["quant_method"], entry["format"]) == ("compressed-tensors", "pack-quantized")
    assert "moetool" not in str(entry)
    for name in (name for name in dense if ".experts." in name):
        own = dense[name].float()
        assert (decoded(tmp_path / "out", name.removesuffix(".weight")) - own).norm() < 0.01 * own.norm()


def put_back(original: Path, exported: Path, target: Path) -> Path:
    """An ordinary checkpoint with what the packed experts stand for."""
    copy_of(original, target)
    change_tensors(
        target,
        lambda tensors: tensors.update(
            {
                name: decoded(exported, name.removesuffix(".weight")).to(tensors[name])
                for name in tensors
                if ".experts." in name
            }
        ),
    )
    return target


@pytest.mark.parametrize(("bits", "most"), [(2, 0.95), (4, 0.9)])
def test_a_text_makes_codes_that_lose_less(
    run_cli: Any, calibration: Any, tiny_mixtral: Path, tiny_tokens: Tensor, tmp_path: Path, bits: int, most: float
) -> None:
    options, tokens = ("--bits", bits, "--group-size", 16, "--json"), tiny_tokens[1000:1256].view(4, 64)
    nearest = export(run_cli, tiny_mixtral, tmp_path / "nearest", *options)
    plan = export(run_cli, tiny_mixtral, tmp_path / "none", *options, *calibration, "--dry-run")
    chosen = export(run_cli, tiny_mixtral, tmp_path / "chosen", *options, *calibration)
    assert (nearest.code, chosen.code) == (0, 0), chosen.stderr
    assert plan.json["output_bytes"] == chosen.json["bytes_after"] == nearest.json["bytes_after"]
    assert plan.json["experts_at_once"] == 4
    assert chosen.json["calibration"]["windows"] == 16
    assert "calibration" not in nearest.json
    assert config_of(tmp_path / "chosen") == config_of(tmp_path / "nearest")
    expected = logits(tiny_mixtral, tokens)
    lost = {
        name: relative_error(
            logits(put_back(tiny_mixtral, tmp_path / name, tmp_path / f"{name}-dense"), tokens), expected
        )
        for name in ("nearest", "chosen")
    }
    assert lost["chosen"] < most * lost["nearest"]


@pytest.mark.parametrize("seed", sampled([0, 1, 2], [0]))
def test_few_experts_at_a_time_give_the_same_but_for_sums_in_another_order(
    run_cli: Any,
    calibration: Any,
    tiny_mixtral: Path,
    tiny_tokens: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    options = ("--bits", 3, "--group-size", 16, *calibration, "--seed", seed)
    assert export(run_cli, tiny_mixtral, tmp_path / "all", *options).code == 0
    monkeypatch.setattr(LayerMemory, "at_once", lambda self, allowed: 3)
    assert export(run_cli, tiny_mixtral, tmp_path / "few", *options).code == 0
    check_packed_alike(tmp_path / "few", tmp_path / "all")
    tokens = tiny_tokens[1000:1256].view(4, 64)
    few, whole = (
        logits(put_back(tiny_mixtral, tmp_path / name, tmp_path / f"{name}-dense"), tokens) for name in ("few", "all")
    )
    assert divergence(few, whole) < 1e-6


def test_a_compressed_model_is_calibrated_as_it_runs(
    run_cli: Any, calibration: Any, small: Path, tmp_path: Path
) -> None:
    result = export(run_cli, small, tmp_path / "out", "--bits", 8, "--group-size", 16, *calibration)
    assert result.code == 0, result.stderr
    assert run_cli("export", small, tmp_path / "dense").code == 0
    dense = load_file(tmp_path / "dense" / WEIGHTS)
    for name in (name for name in dense if ".experts." in name):
        assert relative_error(decoded(tmp_path / "out", name.removesuffix(".weight")), dense[name].float()) < 0.02


def test_killed_runs_resume_to_the_same_bytes(
    crash: CrashDriver, calibration: Any, tiny_mixtral_bf16: Path, tmp_path: Path
) -> None:
    options = ("--format", "compressed-tensors", "--group-size", 16, *calibration, "--shard-size", "20kB")
    arguments = ("export", tiny_mixtral_bf16, *options)
    crash.whole(tmp_path / "whole", arguments)
    crash.goes_on(tmp_path / "out", arguments, 25, tmp_path / "whole")


@pytest.mark.parametrize("family", sampled(ONE_BY_ONE, sorted({*ONE_BY_ONE} & {*MOE_STRUCTURES})))
def test_every_family_names_its_experts_and_nothing_else(
    run_cli: Any, save_model: Any, tmp_path: Path, family: str
) -> None:
    """A reader finds a scheme for exactly the packed modules, and is told to leave every other matrix."""
    source = save_model(build(family), tmp_path / "model")
    add_prediction_layer(source)
    result = export(run_cli, source, tmp_path / "out", "--bits", 4, "--group-size", 8)
    assert result.code == 0, result.stderr
    stored = load_file(tmp_path / "out" / WEIGHTS)
    entry = config_of(tmp_path / "out")["quantization_config"]
    [target] = entry["config_groups"]["experts"]["targets"]
    packed = {name.removesuffix(".weight_packed") for name in stored if name.endswith("weight_packed")}
    plain = {
        name.removesuffix(".weight") for name, tensor in stored.items() if name.endswith(".weight") and tensor.ndim == 2
    }
    reader = Source.open(source).experts
    assert len(packed) == len(reader.moe_layers) * reader.shape.experts * 3
    assert {module for module in packed | plain if matches(module, [target])} == packed
    assert {module for module in packed | plain if matches(module, entry["ignore"])} == plain
    assert matches("lm_head", entry["ignore"])
    # How vLLM asks, whatever the family.
    first = reader.architecture.experts_prefix(reader.moe_layers[0])
    assert all(matches(f"{first}0.{role}_proj", [target]) for role in reader.shape.roles)


def matches(module: str, patterns: list[str]) -> bool:
    """As compressed-tensors and vLLM compare names."""
    return any(
        re.match(pattern.removeprefix("re:"), module) is not None if pattern.startswith("re:") else pattern == module
        for pattern in patterns
    )


@pytest.mark.parametrize("family", sorted(FUSED))
def test_experts_in_one_tensor_are_refused(run_cli: Any, save_model: Any, tmp_path: Path, family: str) -> None:
    source = save_model(build(family), tmp_path / "model")
    result = export(run_cli, source, tmp_path / "out", "--group-size", 16)
    assert result.code == 3
    assert "in one tensor" in result.stderr
    assert "--format gguf" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_llama_cpp_does_not_run_is_not_sent_there(run_cli: Any, save_model: Any, tmp_path: Path) -> None:
    source = save_model(build("jetmoe", **DERIVED["jetmoe"]), tmp_path / "model")
    result = export(run_cli, source, tmp_path / "out", "--group-size", 16)
    assert result.code == 3
    assert "Take --format dense-experts in the original's size." in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), ["Groups of 128", "32", "48", "--group-size 16"]),
        (("--group-size", 12), ["--group-size 16"]),
        (("--group-size", 16, "--tensor-parallel", 5), ["--tensor-parallel 5", "48"]),
        (("--group-size", 16, "--tensor-parallel", 6), ["48 over 6 cards", "--group-size 8"]),
        (("--group-size", 16, "--tensor-parallel", 48), ["48 over 48 cards", "No others do"]),
        (("--group-size", 16, "--bits", 5), ["not 5", "vLLM", "4 and 8"]),
    ],
)
def test_what_does_not_fit_is_said_with_what_does(
    run_cli: Any, tiny_mixtral: Path, tmp_path: Path, options: tuple[object, ...], says: list[str]
) -> None:
    result = export(run_cli, tiny_mixtral, tmp_path / "out", *options)
    assert result.code == 2, result.stderr
    assert all(part in result.stderr for part in says), result.stderr


def test_what_vllm_may_refuse_is_said(run_cli: Any, make_mixtral: Any, save_model: Any, tmp_path: Path) -> None:
    source = save_model(make_mixtral(hidden_size=128, intermediate_size=64, num_hidden_layers=1), tmp_path / "model")
    fits = export(run_cli, source, tmp_path / "fits", "--group-size", 64)
    assert fits.code == 0
    assert "vLLM" not in fits.stderr
    narrow = export(run_cli, source, tmp_path / "narrow", "--group-size", 32, "--tensor-parallel", 2)
    assert "whose width on a card 64 divides (here 32)" in narrow.stderr
    options = ("--group-size", 64, "--bits", 3)
    assert "4 or 8 bits (here 3)" in export(run_cli, source, tmp_path / "few", *options).stderr
    planned = export(run_cli, source, tmp_path / "none", *options, "--dry-run", "--json")
    assert planned.json["vllm_kernels_want"] == "4 or 8 bits (here 3)"


def test_experts_of_an_eye_stay_and_are_told_of(run_cli: Any, save_model: Any, tokens: Tensor, tmp_path: Path) -> None:
    """transformers looks for codes of these, too: the model that sees cannot be loaded, the language model can."""
    source, out = save_model(build("dots3_note", **AROUND["dots3_note"]), tmp_path / "model"), tmp_path / "out"
    plan = export(run_cli, source, tmp_path / "none", "--bits", 8, "--group-size", 8, "--dry-run", "--json")
    result = export(run_cli, source, out, "--bits", 8, "--group-size", 8)
    assert result.code == 0, result.stderr
    for told in (plan.json["note"], result.stderr):
        assert "(vision_encoder.blocks.1.mlp.experts.0.fc1.weight) stay as they are" in told
        assert "AutoModelForImageTextToText fails" in told
    if importlib.util.find_spec("compressed_tensors") is None:
        return
    with quiet(), torch.inference_mode():
        assert relative_error(load_alone(out)(tokens).logits, load_alone(source)(tokens).logits) < 0.03
        with pytest.raises(RuntimeError, match="issues during automatic conversion"):
            AutoModelForImageTextToText.from_pretrained(out)


def load_alone(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def test_an_export_is_an_input(run_cli: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    assert export(run_cli, tiny_mixtral, tmp_path / "out", "--group-size", 16).code == 0
    dense = run_cli("export", tmp_path / "out", tmp_path / "dense", "--format", "dense-experts")
    assert dense.code == 0, dense.stderr
    before, after = load_file(tiny_mixtral / WEIGHTS), load_file(tmp_path / "dense" / WEIGHTS)
    assert after.keys() == before.keys()
    errors = [(after[name] - own).norm() / own.norm() for name, own in before.items() if ".experts." in name]
    assert 0.02 < max(errors) < 0.2
    assert all(after[name].equal(own) for name, own in before.items() if ".experts." not in name)


def test_an_export_is_verified(run_cli: Any, small: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    """Its digests, and against what it was made from every tensor that is in both."""
    out = tmp_path / "out"
    assert export(run_cli, small, out, "--bits", 4, "--group-size", 16).code == 0
    told = run_cli("verify", out, "--against", small, "--json").json
    shared = load_file(out / WEIGHTS).keys() & load_file(small / WEIGHTS).keys()
    assert told["same_tensors"] == len(shared) > 0
    assert "packed" in told["notes"][0]
    assert run_cli("verify", out, "--against", tiny_mixtral).code == 0
    with (out / WEIGHTS).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    assert run_cli("verify", out).code == 5
    (out / "moetool.json").unlink()
    assert run_cli("verify", out).code == 0  # as anybody's packed checkpoint: nothing tells what was written
