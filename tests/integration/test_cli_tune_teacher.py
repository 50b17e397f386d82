"""`moetool tune --teacher`: a model that learns another's predictions beside the text."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents, divergence, logits, tensors_of
from safetensors.torch import load_file, save_file

SHORT = ("--sequence-length", 32, "--batch-size", 4, "--learning-rate", 1e-3)


@pytest.fixture(scope="module")
def text(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(tiny_text.read_text()[:6000])
    return path


@pytest.fixture(scope="module")
def student(save_model: Any, make_mixtral: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the teacher, but for noise on every matrix."""
    model = make_mixtral()
    stream = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=stream)
    path: Path = save_model(model, tmp_path_factory.mktemp("model") / "student")
    return path


def test_predictions_come_nearer_to_the_teachers(
    run_cli: Any, student: Path, tiny_mixtral: Path, text: Path, tiny_tokens: torch.Tensor, tmp_path: Path
) -> None:
    tokens = tiny_tokens[:128].view(2, 64)
    teacher, found = logits(tiny_mixtral, tokens), {}
    for share in (0.5, 1):
        output = tmp_path / f"tuned-{share}"
        words = ("--data", text, *SHORT, "--steps", 20, "--teacher", tiny_mixtral, "--teacher-share", share, "--json")
        result = run_cli("tune", student, output, *words, "--log-every", 5)
        assert result.code == 0, result.stderr
        curve = [point["teacher_kl"] for point in result.json["curve"] if "teacher_kl" in point]
        assert len(curve) == 5  # steps 1, 5, 10, 15 and 20
        assert share < 1 or curve[-1] < curve[0]
        found[share] = divergence(logits(output, tokens), teacher)
    assert found[1] < found[0.5]
    assert found[1] < 0.7 * divergence(logits(student, tokens), teacher)


def test_the_share_decides_between_text_and_teacher(
    run_cli: Any, tiny_mixtral: Path, text: Path, tmp_path: Path
) -> None:
    """A model that is its own teacher has nothing to learn of it, and all of the text."""
    moved = {}
    for share in (0.5, 1):
        output = tmp_path / f"tuned-{share}"
        words = ("--data", text, *SHORT, "--steps", 1, "--balance", 0, "--warmup", 0, "--teacher", tiny_mixtral)
        assert run_cli("tune", tiny_mixtral, output, *words, "--teacher-share", share).code == 0
        before, after = tensors_of(tiny_mixtral), tensors_of(output)
        moved[share] = sum((after[name] - before[name]).abs().sum().item() for name in before)
    assert moved[1] < 0.5 * moved[0.5]


def test_resumed_it_gives_the_same_bytes(
    run_cli: Any, student: Path, tiny_mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--data", text, *SHORT, "--steps", 4, "--save-every", 2, "--teacher", tiny_mixtral)
    assert run_cli("tune", student, tmp_path / "whole", *words).code == 0

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("moetool.tune.writing.write_checkpoint", fail)
        assert run_cli("tune", student, tmp_path / "cut", *words).code != 0
    result = run_cli("tune", student, tmp_path / "cut", *words, "--resume")
    assert result.code == 0, result.stderr
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    other = run_cli("tune", student, tmp_path / "cut", *words[:-1], student, "--resume")
    assert other.code == 2


def test_a_plan_counts_the_teacher(run_cli: Any, student: Path, tiny_mixtral: Path, text: Path, tmp_path: Path) -> None:
    words = ("tune", student, tmp_path / "out", "--data", text, *SHORT, "--steps", 4, "--dry-run", "--json")
    alone, taught = run_cli(*words).json, run_cli(*words, "--teacher", tiny_mixtral).json
    size = sum(4 * tensor.numel() for tensor in tensors_of(tiny_mixtral).values())
    assert taught["peak_memory_bytes"] - alone["peak_memory_bytes"] > size
    assert taught["seconds"] > alone["seconds"]


def test_teachers_that_cannot_teach(
    run_cli: Any, student: Path, tiny_mixtral: Path, make_mixtral: Any, save_model: Any, text: Path, tmp_path: Path
) -> None:
    words = ("tune", student, tmp_path / "out", "--data", text, *SHORT, "--steps", 2)
    result = run_cli(*words, "--teacher-share", 0.5)
    assert result.code == 2
    assert "--teacher-share is for --teacher" in result.stderr
    result = run_cli(*words, "--teacher", tmp_path / "nowhere")
    assert result.code in (2, 3)
    assert "nowhere" in result.stderr

    size = json.loads((student / "config.json").read_text())["vocab_size"]
    larger = save_model(make_mixtral(vocab_size=size + 8), tmp_path / "larger")
    for result in (run_cli(*words, "--teacher", larger, "--dry-run"), run_cli(*words, "--teacher", larger)):
        assert result.code == 3
        assert f"predicts {size + 8} tokens" in result.stderr

    damaged = shutil.copytree(tiny_mixtral, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    result = run_cli(*words, "--teacher", damaged, "--overwrite")
    assert result.code == 5
    assert "damaged predicts what is no number" in result.stderr

    result = run_cli(*words, "--teacher", tiny_mixtral, "--memory", "100MB", "--overwrite")
    assert result.code == 4
