"""`moetool repair` with one layer of the model in memory at a time, run as a user runs it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import tensors_of
from derived_families import DERIVED
from sampling import sampled
from stored_words import save_gptq
from torch import Tensor

SHORT = ("--samples", 8, "--sequence-length", 32, "--held-out", 4, "--batch-size", 4, "--steps", 4)
# Norms, experts and matrices that lie turned, biases, latent attention, shared experts, states.
FAMILIES = ("mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_next", "jamba", "granitemoehybrid")
Repair = Callable[..., tuple[Any, dict[str, Tensor]]]


@pytest.fixture
def repair(run_cli: Any, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repair:
    """`repair(model, source, *options, streams=…)` gives what a job tells and makes, with or without much memory."""

    def run(model: Path, source: Path, *options: object, streams: bool) -> tuple[Any, dict[str, Tensor]]:
        output = tmp_path / f"streamed-{streams}"
        with monkeypatch.context() as patch:
            patch.setattr("moetool.repair.students.usable_bytes", lambda _: 0 if streams else 1 << 60)
            words = ("repair", model, output, "--to", source, "--calibration", tiny_text, *SHORT, *options)
            planned = run_cli(*words, "--dry-run", "--json")
            assert planned.code == 0, planned.stderr
            assert planned.json["weights"].startswith("in memory") != streams
            result = run_cli(*words, "--json")
        assert result.code == 0, result.stderr
        return result.json, {} if model.suffix else tensors_of(output)

    return run


def check_equal(repair: Repair, model: Path, source: Path, *options: object) -> None:
    told, streamed = repair(model, source, *options, streams=True)
    other, held = repair(model, source, *options, streams=False)
    assert told["curve"] == other["curve"]
    assert told["trained_parameters"] == other["trained_parameters"]
    assert told["kept_step"] > 0, "of the input's own values nothing would be seen"
    before = tensors_of(model)
    assert streamed.keys() == held.keys() == before.keys()
    assert all(streamed[name].equal(own) for name, own in held.items())
    assert any(not streamed[name].equal(own) for name, own in before.items())


@pytest.fixture
def noisy(save_model: Any, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """`noisy(family)`: a tiny model, and the same with noise in all that it has."""

    def make(family: str) -> tuple[Path, Path]:
        model = families.build(family, dtype=torch.bfloat16, **DERIVED.get(family, {}))
        source = save_model(model, tmp_path / "source")
        stream = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * parameter.std() * torch.randn(parameter.shape, generator=stream)
        return source, save_model(model, tmp_path / "noisy")

    return make


@pytest.mark.parametrize("family", sampled(FAMILIES, ("mixtral", "gpt_oss")))
def test_it_learns_what_a_model_in_memory_learns(family: str, noisy: Any, repair: Repair) -> None:
    source, model = noisy(family)
    check_equal(repair, model, source, "--train", "lora", "--learning-rate", 0.004)


def test_scales_of_codes_learn_the_same(save_model: Any, repair: Repair, tmp_path: Path) -> None:
    source = save_model(families.build("mixtral", dtype=torch.bfloat16), tmp_path / "source")
    save_gptq(source, tmp_path / "stored", desc_act=False)
    check_equal(repair, tmp_path / "stored", source, "--steps", 12, "--samples", 32)


def test_a_moefied_model_learns_the_same(dense: Any, moefy: Any, repair: Repair) -> None:
    original = dense("llama")
    moefied = moefy(original, "--experts", 8, "--keep", 0.5).path
    words = ("--train", "lora", "--learning-rate", 0.002, "--samples", 64, "--steps", 16)
    check_equal(repair, moefied, original, *words)


def test_codes_in_the_files_train_the_same(
    compress: Any, repair: Repair, tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded = compress(tiny_mixtral, "--method", "quantize", "--bits", 2, "--group-size", 16, "--rounding", "nearest")
    monkeypatch.setattr("moetool.repair.costs.decoded_size", lambda _: 1 << 61)  # decoded in every step
    check_equal(repair, coded.path, tiny_mixtral, "--learning-rate", 0.02)


@pytest.mark.parametrize("family", sampled(("mixtral", "gpt_oss", "deepseek_v3", "llama"), ("mixtral",)))
def test_a_file_is_made_the_same(
    family: str, save_model: Any, dense: Any, run_cli: Any, repair: Repair, tmp_path: Path
) -> None:
    source = dense("llama") if family == "llama" else None
    source = source or save_model(families.build(family, **DERIVED.get(family, {})), tmp_path / "source")
    exported = run_cli(
        "export", source, tmp_path / "file", "--format", "gguf", "--type", "q4_0", "--experts-type", "q4_0"
    )
    assert exported.code == 0, exported.stderr
    words = ("--learning-rate", 0.003, "--samples", 32, "--steps", 8)
    made = []
    for streams in (True, False):
        told, _ = repair(tmp_path / "file" / "model.gguf", source, *words, streams=streams)
        assert told["kept_step"] > 0
        made.append((tmp_path / f"streamed-{streams}" / "model.gguf").read_bytes())
    assert made[0] == made[1]
    assert made[0] != (tmp_path / "file" / "model.gguf").read_bytes()


def test_all_weights_are_trained_in_memory_alone(run_cli: Any, noisy: Any, tiny_text: Path, tmp_path: Path) -> None:
    source, model = noisy("mixtral")
    words = ("repair", model, tmp_path / "out", "--to", source, "--calibration", tiny_text, *SHORT, "--train", "all")
    refused = run_cli(*words, "--memory", "401MB")
    assert refused.code != 0
    assert "--train lora" in refused.stderr


def test_a_run_is_gone_on_with_in_less_memory(
    run_cli: Any, noisy: Any, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = noisy("mixtral")

    def run(name: str, room: int, *options: object) -> Any:
        monkeypatch.setattr("moetool.repair.students.usable_bytes", lambda _: room)
        words = ("repair", model, tmp_path / name, "--to", source, "--calibration", tiny_text, *SHORT, *options)
        return run_cli(*words, "--json")

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    assert run("whole", 1 << 60).json["trains"] == "all"
    with monkeypatch.context() as patch:
        patch.setattr("moetool.repair.students.write_checkpoint", fail)
        assert run("cut", 1 << 60).code != 0
    result = run("cut", 0, "--resume")
    assert result.code == 0, result.stderr
    assert result.json["trains"] == "all"
    ours, theirs = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "cut")
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert run("less", 0).json["trains"] == "lora"


def test_what_is_added_is_part_of_the_matrices(noisy: Any, repair: Repair) -> None:
    source, model = noisy("mixtral")
    _, made = repair(model, source, "--train", "lora", "--learning-rate", 0.004, streams=True)
    before = tensors_of(model)
    moved = {name for name, own in before.items() if not made[name].equal(own)}
    assert any("experts" in name for name in moved)
    assert any("self_attn" in name for name in moved)
    assert not [name for name in moved if "embed" in name or "lm_head" in name]
    name = next(name for name in moved if "q_proj" in name)
    values = torch.linalg.svdvals(made[name].double() - before[name].double())
    assert values[16:].max() < 0.2 * values[0], "beside what rounding adds, of rank 16"
