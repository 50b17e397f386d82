"""`verify --against --text`: how like its source a checkpoint is, and what fails when it is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_families import build_dense
from transformers import AutoModelForCausalLM

from moetool.checkpoint.reader import Checkpoint
from moetool.job.progress import Progress
from moetool.measure.likeness import LikenessOptions, layer_errors

RunCli = Callable[..., Any]


@pytest.fixture(scope="module")
def quantized(tiny_mixtral: Path, run_cli: RunCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized") / "model"
    made = run_cli("compress", tiny_mixtral, path, "--method", "ders-quantize", "--bits", 2, "--group-size", 16)
    assert made.code == 0, made.stderr
    assert "verified" in made.stdout
    return path


def test_a_copy_is_no_way_off(tiny_mixtral: Path, tiny_text: Path, run_cli: RunCli) -> None:
    options = ("--against", tiny_mixtral, "--text", tiny_text, "--windows", 2, "--max-kl", 0, "--min-top1", 1)
    result = run_cli("verify", tiny_mixtral, *options, "--max-layer-error", 0, "--json")
    assert result.code == 0, result.stderr
    told = result.json["likeness"]
    assert (told["kl"], told["agreement"], told["windows"], told["tokens"]) == (0, 1, 2, 256)
    assert told["layer_error"] == {"0": 0, "1": 0, "2": 0}


def test_every_limit_fails_with_its_numbers(
    quantized: Path, tiny_mixtral: Path, tiny_text: Path, run_cli: RunCli
) -> None:
    text = ("--against", tiny_mixtral, "--text", tiny_text, "--windows", 2)
    shown = run_cli("verify", quantized, *text)
    assert shown.code == 0, shown.stderr
    assert "top-1 agreement" in shown.stdout
    assert "output error" in shown.stdout
    told = run_cli("verify", quantized, *text, "--json").json["likeness"]
    assert told["kl"] > 0
    assert told["agreement"] < 1
    worst = max(told["layer_error"].values())
    kept = ("--max-kl", 1.01 * told["kl"], "--min-top1", told["agreement"] - 0.01, "--max-layer-error", 1.01 * worst)
    assert run_cli("verify", quantized, *text, *kept).code == 0
    limits = ("--max-kl", 0.99 * told["kl"], "--min-top1", told["agreement"] + 0.01, "--max-layer-error", 0.99 * worst)
    for option, limit in zip(limits[::2], limits[1::2], strict=True):
        failed = run_cli("verify", quantized, *text, option, limit)
        assert failed.code == 5
        assert f"({option} " in failed.stderr
        assert "ok" not in failed.stdout
        assert run_cli("verify", quantized, option, limit).code == 2
    assert run_cli("verify", quantized, "--text", tiny_text).code == 2


def test_layer_errors_are_those_of_layers_side_by_side(
    quantized: Path, tiny_mixtral: Path, tiny_tokens: torch.Tensor
) -> None:
    """By transformers' own forward: the second layer of one model, put into the other."""
    tokens = tiny_tokens[:96].view(3, 32)
    found = layer_errors(
        Checkpoint.open(quantized), Checkpoint.open(tiny_mixtral), tokens.split(2), LikenessOptions(), Progress()
    )
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (tiny_mixtral, quantized)
    ]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(_: Any, inputs: Any, output: Any) -> None:
        seen.append((inputs[0], output[0] if isinstance(output, tuple) else output))

    with torch.inference_mode():
        original = models[0].model.layers[1]
        handle = original.register_forward_hook(note)
        models[0](input_ids=tokens)
        handle.remove()
        models[0].model.layers[1] = models[1].model.layers[1]
        models[0].model.layers[1].register_forward_hook(note)
        models[0](input_ids=tokens)
    (x, true), (same, given) = seen
    assert torch.equal(x, same)
    assert found[1] == pytest.approx(((given - true).norm() / (true - x).norm()).item(), rel=1e-3)
    assert 0.01 < found[1] < 2


def test_dense_models_and_what_was_made_of_them(
    save_model: Callable[..., Path], tiny_text: Path, run_cli: RunCli, tmp_path: Path
) -> None:
    dense_llama = save_model(build_dense("llama", 0, torch.float32), tmp_path / "llama")
    text = ("--against", dense_llama, "--text", tiny_text, "--windows", 1, "--json")
    for method, is_compared in {"vanilla": True, "pesc": False}.items():
        out = tmp_path / method
        made = run_cli("upcycle", dense_llama, out, "--method", method, "--experts", 2, "--top-k", 1)
        assert made.code == 0, made.stderr
        result = run_cli("verify", out, *text)
        assert result.code == 0, result.stderr
        told = result.json["likeness"]
        assert told["kl"] < 1e-6
        assert (told["layer_error"] is not None) == is_compared
        if is_compared:
            assert max(told["layer_error"].values()) < 1e-4
        else:
            assert run_cli("verify", out, *text, "--max-layer-error", 1).code == 2
