"""Results that keep what they do not change in the bits that another tool has stored it in (`--keep-stored`)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import config_of, contents, load_whole, tensors_of, weights
from derived_families import DERIVED
from sampling import sampled
from stored_bits import save_compressed_tensors, save_fp8, save_mxfp4
from stored_mlx import save_mlx
from stored_words import save_awq, save_bitsandbytes, save_gptq, save_nvfp4
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import WeightRenaming

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.job.job import Source
from moetool.report.storing import bytes_by_kind
from moetool.runtime.building import quantizer_of

_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True}
SAVED: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "fp8": ("deepseek_v3", save_fp8),
    "int4": ("qwen3_moe", lambda source, target: save_compressed_tensors(source, target, "pack-quantized", _INT4)),
    "gptq": ("mixtral", save_gptq),
    "awq": ("qwen3_moe", save_awq),
    "bitsandbytes": ("mixtral", save_bitsandbytes),
    "int8": ("mixtral", lambda source, target: save_bitsandbytes(source, target, "int8")),
    "nvfp4": ("deepseek_v3", save_nvfp4),
    "mxfp4": ("gpt_oss", save_mxfp4),
    "mlx": ("deepseek_v3", save_mlx),
    "mlx-in-one-tensor": ("gpt_oss", save_mlx),
}
# In groups of DeepSeek-V3's least size there is no expert too many.
UNGROUPED = {"fp8 of Qwen3": ("qwen3_moe", save_fp8), "nvfp4 of Mixtral": ("mixtral", save_nvfp4)}
JOB = ("--method", "quantize", "--bits", 3, "--group-size", 8)
Stored = Callable[[str], Path]


@pytest.fixture(scope="module")
def stored(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """`stored(format)`: a tiny model in that format."""
    root, made = tmp_path_factory.mktemp("stored"), dict[str, Path]()

    def make(form: str) -> Path:
        if form not in made:
            family, save = {**SAVED, **UNGROUPED}[form]
            own = {**DERIVED.get(family, {}), **({"intermediate_size": 64} if family == "gpt_oss" else {})}
            source = save_model(families.build(family, dtype=torch.bfloat16, **own), root / f"{form}-source")
            save(source, root / form)
            made[form] = root / form
        return made[form]

    return make


@pytest.fixture(scope="module")
def fp8(run_cli: Any, stored: Stored, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model in FP8, what is made of it, and the same with all else in bf16."""
    root = tmp_path_factory.mktemp("fp8")
    run(run_cli, "compress", stored("fp8"), root / "kept", *JOB)
    run(run_cli, "compress", stored("fp8"), root / "wide", *JOB, "--no-keep-stored")
    return stored("fp8"), root / "kept", root / "wide"


def run(run_cli: Any, *arguments: object) -> Any:
    result = run_cli(*arguments, "--json")
    assert result.code == 0, result.stderr
    return result.json


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: set[str]) -> None:
    for name in names:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name].view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8)), name


def kept_names(source: Path) -> set[str]:
    """Tensors of a model's files, beside its experts, that are needed to decode them or to run the model."""
    unread = ("input_scale", "bias")  # of activations, and zeros that AutoGPTQ writes
    return {name for name in in_files(source) if ".experts." not in name and not name.endswith(unread)}


def in_files(path: Path) -> dict[str, Tensor]:
    """Tensors as the files hold them, under the names that they have where they are kept."""
    opened = Checkpoint.open(path)
    return {name: opened.read_stored(name) for name in opened.on_disk}


def logits(path: Path, **options: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
    with torch.no_grad():
        found: Tensor = model(torch.arange(24).view(1, -1)).logits
    return found


@pytest.mark.parametrize("form", sampled(SAVED, ("fp8", "int4", "gptq", "mxfp4", "mlx-in-one-tensor")))
def test_what_is_not_compressed_keeps_its_bits(run_cli: Any, stored: Stored, tmp_path: Path, form: str) -> None:
    source, kept, wide = stored(form), tmp_path / "kept", tmp_path / "wide"
    plan = run(run_cli, "compress", source, kept, *JOB, "--dry-run")
    run(run_cli, "compress", source, kept, *JOB)
    run(run_cli, "compress", source, wide, *JOB, "--no-keep-stored")
    assert plan["stored_as"].endswith("matrices beside the experts stay as they are stored")
    assert plan["output_bytes"] == Checkpoint.open(kept).weight_bytes
    same_bits(in_files(kept), in_files(source), kept_names(source))
    told = config_of(kept)["quantization_config"]
    if form == "mxfp4":  # of experts alone
        assert weights(kept) == weights(wide)
        assert "stored" not in told
    else:
        assert told["stored"] == Checkpoint.open(source).stored_entry
        assert told["format_version"] == 3
    assert "stored" not in config_of(wide)["quantization_config"]
    load_whole(kept)
    assert torch.equal(logits(kept), logits(wide))


def test_commands_on_such_a_result(run_cli: Any, fp8: tuple[Path, Path, Path], tiny_text: Path, tmp_path: Path) -> None:
    source, kept, wide = fp8
    assert Checkpoint.open(kept).weight_bytes < Checkpoint.open(wide).weight_bytes
    verified = [run(run_cli, "verify", path, "--against", source) for path in (kept, wide)]
    assert verified[0]["same_tensors"] == verified[1]["same_tensors"] > 0
    text = ("--data", tiny_text, "--windows", 2, "--sequence-length", 32)
    assert run(run_cli, "eval", kept, "--against", wide, *text)["against"]["kl"] < 1e-12
    for path in (kept, wide):
        run(run_cli, "export", path, tmp_path / f"{path.name}-dense", "--format", "dense-experts")
    assert weights(tmp_path / "kept-dense") == weights(tmp_path / "wide-dense")
    assert config_of(tmp_path / "kept-dense") == config_of(tmp_path / "wide-dense")
    inspected = run_cli("inspect", kept)
    assert "stored in FP8 in blocks of 8 × 8" in inspected.stdout
    one, other = (run(run_cli, "inspect", path) for path in (kept, wide))
    assert one["parameters"]["total"] == other["parameters"]["total"]
    assert one["original_bytes"] == other["original_bytes"] == Checkpoint.open(source).weight_bytes
    run(run_cli, "report", kept, tmp_path / "report.html")
    opened = Source.open(kept)
    in_files = sum(info.nbytes for info in opened.checkpoint.on_disk.values())
    assert sum(bytes_by_kind(opened.checkpoint, opened.experts).values()) == in_files


def test_saved_again_it_is_in_the_model_s_dtype(fp8: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, kept, wide = fp8
    for path in (kept, wide):
        AutoModelForCausalLM.from_pretrained(path).save_pretrained(tmp_path / path.name)
    assert weights(tmp_path / "kept") == weights(tmp_path / "wide")
    entries = [config_of(tmp_path / path.name)["quantization_config"] for path in (kept, wide)]
    assert entries[0] == entries[1]


def test_layers_can_be_offloaded_to_disk(fp8: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, kept, wide = fp8
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.layers.2": "disk"}
    places |= {"model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    found = [logits(path, device_map=places, offload_folder=tmp_path / path.name) for path in (kept, wide)]
    assert torch.equal(*found)


def test_codes_are_never_taken_for_numbers(fp8: tuple[Path, Path, Path]) -> None:
    """transformers falls back on the name in the file where its renamings lead to no parameter."""
    quantizer: Any = quantizer_of(config_of(fp8[1]))
    quantizer._checkpoint = Checkpoint.open(fp8[1])
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(InvalidInputError, match=f"{name} is in few bits"):
        quantizer.get_new_dtype(WeightRenaming(name, name), torch.zeros(1), torch.bfloat16)
    other = "model.norm.weight"
    assert quantizer.get_new_dtype(WeightRenaming(other, other), torch.zeros(1), torch.bfloat16) == torch.bfloat16


def test_damage_to_what_is_kept_is_found(run_cli: Any, fp8: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, kept, _ = fp8
    for name, content in contents(kept).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    config = config_of(tmp_path)
    del config["quantization_config"]["stored"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run_cli("verify", tmp_path)
    assert result.code != 0
    assert "Traceback" not in result.stderr


def test_stages_by_hand_keep_the_same(
    run_cli: Any, stored: Stored, tmp_path: Path, calibration: tuple[object, ...]
) -> None:
    source, whole = stored("fp8"), tmp_path / "whole"
    run(run_cli, "decompose", source, tmp_path / "one", "--base", "mean")
    run(run_cli, "quantize-delta", tmp_path / "one", tmp_path / "two", "--bits", 4, "--group-size", 8)
    run(run_cli, "compress", source, whole, "--method", "ders-quantize", "--bits", 4, "--group-size", 8)
    assert weights(tmp_path / "two") == weights(whole)
    names = kept_names(source)
    for made in ("one", "two"):
        same_bits(tensors_of(tmp_path / made), tensors_of(source), names)
    text = (*calibration, "--steps", 1, "--held-out", 2)
    run(run_cli, "repair", tmp_path / "two", tmp_path / "repaired", "--to", source, *text)
    assert Checkpoint.open(tmp_path / "repaired").weight_bytes == Checkpoint.open(whole).weight_bytes
    forms = Checkpoint.open(source).forms
    held = {part for name, form in forms.items() if ".experts." not in name for part in form.parts}
    same_bits(tensors_of(tmp_path / "repaired"), tensors_of(source), held)
    load_whole(tmp_path / "repaired")


def test_included_weights_that_have_few_bits_stay(run_cli: Any, stored: Stored, tmp_path: Path) -> None:
    source, made = stored("fp8"), tmp_path / "made"
    run(run_cli, "compress", source, made, *JOB, "--include", "attention,embeddings")
    tensors = tensors_of(made)
    same_bits(tensors, tensors_of(source), {name for name in kept_names(source) if "self_attn" in name})
    coded = {name.partition(".moetool.")[0] for name in tensors if ".moetool." in name and ".experts." not in name}
    assert coded == {"model.embed_tokens", "lm_head"}
    load_whole(made)


@pytest.mark.exhaustive
def test_a_killed_job_resumes_to_the_same_bytes(fp8: tuple[Path, Path, Path], crash: Any, tmp_path: Path) -> None:
    source, kept, _ = fp8
    output, job = tmp_path / "out", ("compress", source, *JOB, "--shard-size", 20000)
    crash(tmp_path / "whole", job)
    crash(output, job, at=9)
    assert not (output / "config.json").exists()
    crash(output, (*job, "--resume"))
    assert weights(output) == weights(tmp_path / "whole")
    assert (
        Checkpoint.open(output)
        .read("model.layers.0.self_attn.o_proj.weight")
        .equal(Checkpoint.open(kept).read("model.layers.0.self_attn.o_proj.weight"))
    )


def test_experts_stay_as_they_are_stored_where_that_is_cheaper(
    run_cli: Any, stored: Stored, tmp_path: Path, calibration: tuple[object, ...]
) -> None:
    """In 4 bits again, all experts would lose something to save a few bytes."""
    source, plan = stored("int4"), tmp_path / "plan.yaml"
    job = ("--group-size", 8, *calibration)
    made = run(run_cli, "compress", source, tmp_path / "kept", *job, "--ratio", 0.01, "--save-plan", plan)
    run(run_cli, "compress", source, tmp_path / "followed", *job, "--plan", plan)
    assert weights(tmp_path / "kept") == weights(tmp_path / "followed")
    entry, layers = config_of(tmp_path / "kept")["quantization_config"], Source.open(source).experts.moe_layers
    kept = [layer for layer in layers if str(layer) not in entry["layers"]]
    assert 0 < len(kept) < len(layers)
    assert made["achieved_ratio"] == pytest.approx(0.01, abs=2e-4)
    layers_kept = "one layer" if len(kept) == 1 else f"{len(kept)} layers"
    assert f"Experts of {layers_kept} stay as they are stored: that loses nothing, for its bytes." in made["notes"]
    before, after = tensors_of(source), tensors_of(tmp_path / "kept")
    experts = {name for layer in kept for name in before if f".layers.{layer}.mlp.experts." in name}
    assert any(name.endswith("weight_packed") for name in experts)
    same_bits(after, before, experts)
    load_whole(tmp_path / "kept")
    assert run(run_cli, "verify", tmp_path / "kept", "--against", source)["relative_error"]
    run(run_cli, "export", tmp_path / "kept", tmp_path / "dense", "--format", "dense-experts")
    dense, shown = Checkpoint.open(tmp_path / "dense"), Checkpoint.open(source)
    for name in experts:
        if name.endswith("weight_packed"):
            matrix = name.removesuffix("_packed")
            assert dense.read(matrix).equal(shown.read(matrix))
    refused = run_cli("compress", source, tmp_path / "wide", *job, "--plan", plan, "--no-keep-stored")
    assert refused.code == 3
    assert "Give it forms" in refused.stderr


def test_a_ratio_is_of_the_stored_bytes(
    run_cli: Any, stored: Stored, tmp_path: Path, calibration: tuple[object, ...]
) -> None:
    source = stored("fp8")
    job = ("--method", "quantize", "--group-size", 8, "--ratio", 0.2, *calibration)
    told = run(run_cli, "compress", source, tmp_path / "out", *job)
    assert told["achieved_ratio"] >= 0.2
    made = Checkpoint.open(tmp_path / "out")
    assert made.weight_bytes <= 0.8 * Checkpoint.open(source).weight_bytes
    assert made.stored_as == "FP8 in blocks of 8 × 8"


@pytest.mark.parametrize("method", ["reap", "drop-experts"])
@pytest.mark.parametrize("form", sampled([*UNGROUPED, "int4", "gptq", "awq", "int8", "mxfp4"], [*UNGROUPED, "mxfp4"]))
def test_fewer_experts_are_a_checkpoint_in_the_same_format(
    run_cli: Any, stored: Stored, tmp_path: Path, calibration: tuple[object, ...], form: str, method: str
) -> None:
    source, kept, wide = stored(form), tmp_path / "kept", tmp_path / "wide"
    reader = Source.open(source).experts
    job: tuple[object, ...] = ("--method", "reap", "--experts", reader.shape.experts - 2, *calibration)
    if method == "drop-experts":
        job = ("--method", method, "--drop", f"0,{reader.shape.experts - 1}")
    plan = run(run_cli, "compress", source, kept, *job, "--dry-run")
    run(run_cli, "compress", source, kept, *job)
    run(run_cli, "compress", source, wide, *job, "--no-keep-stored")
    assert plan["output_bytes"] == Checkpoint.open(kept).weight_bytes
    config = config_of(kept)
    assert config.pop("quantization_config") == config_of(source)["quantization_config"]
    assert config == config_of(wide)
    one, other = Checkpoint.open(kept), Checkpoint.open(wide)
    assert one.tensors.keys() == other.tensors.keys()
    assert all(one.read(name).equal(other.read(name)) for name in other.tensors)
    lost = {name for name in tensors_of(source) if f".experts.{reader.shape.experts - 1}." in name}
    lost |= {name for name in tensors_of(source) if f".experts.{reader.shape.experts - 2}." in name}
    further = {name for name in tensors_of(source) if f".layers.{reader.architecture.layers}." in name}
    assert tensors_of(kept).keys() == tensors_of(source).keys() - lost - further
    run(run_cli, "verify", kept)
    again = ("--method", "quantize", "--bits", 3, "--group-size", 8)
    for path in (kept, wide):
        run(run_cli, "compress", path, tmp_path / f"{path.name}-3", *again, "--no-keep-stored")
    assert weights(tmp_path / "kept-3") == weights(tmp_path / "wide-3")


def test_bytes_beside_the_experts_are_those_of_the_result(fp8: tuple[Path, Path, Path]) -> None:
    """Of what stays in FP8 as many as in the files, else as many as in bf16: both but for the files' headers."""
    source, kept, wide = fp8
    for keeps, result in ((True, kept), (False, wide)):
        opened = replace(Source.open(source), keeps_stored=keeps)
        left = [tensor for name, tensor in tensors_of(result).items() if ".mlp.experts." not in name]
        size = sum(tensor.nbytes for tensor in left)
        headers = opened.checkpoint.weight_bytes - sum(info.nbytes for info in opened.checkpoint.on_disk.values())
        assert 0 <= opened.bytes_beside_experts - size <= headers
