"""`export --format gguf` in types whose codes are chosen on a text."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents, load
from families import build
from sampling import sampled
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moetool.calibration.windows import load_tokenizer, sample_windows
from moetool.checkpoint.reader import Checkpoint

gguf = pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")


def export(run_cli: Any, source: Path, target: Path, *options: object) -> Any:
    return run_cli("export", source, target, "--format", "gguf", *options)


def types(file: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


def logits(path: Path, windows: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = load(path)(windows).logits.log_softmax(-1)
    return found


def divergence(file: Path, source: Path, windows: Tensor) -> float:
    """Mean Kullback-Leibler divergence of a file's predictions, read back by moetool, from the model's own."""
    own, other = logits(source, windows), logits(Checkpoint.open(file).path, windows)
    return float((own.exp() * (own - other)).sum(-1).mean())


@pytest.fixture(scope="module")
def wide(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral whose hidden size super-blocks divide, and whose experts are 96 wide."""
    path = tmp_path_factory.mktemp("wide") / "in"
    build("mixtral", vocab_size=320, hidden_size=256, intermediate_size=96).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("number", sampled(["q2_k", "q3_k"], ["q3_k"]))
def test_codes_chosen_on_a_text_lose_less(
    run_cli: Any,
    calibration: tuple[object, ...],
    wide: Path,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    windows = sample_windows(str(tiny_text), load_tokenizer(wide), samples=16, sequence_length=32, seed=0)
    lost = {}
    for name, options in {"nearest": (), "chosen": calibration}.items():
        result = export(run_cli, wide, tmp_path / name, "--type", number, *options)
        assert result.code == 0, result.stderr
        assert "3 are iq4_nl, blk.0.ffn_down_exps.weight among them" in result.stderr
        lost[name] = divergence(tmp_path / name / "model.gguf", wide, windows)
    assert lost["chosen"] < 0.7 * lost["nearest"]
    found = types(tmp_path / "chosen" / "model.gguf")
    assert found["blk.1.ffn_up_exps.weight"] == found["blk.1.attn_q.weight"] == number.upper()
    assert (found["blk.1.ffn_down_exps.weight"], found["token_embd.weight"]) == ("IQ4_NL", "Q8_0")
    assert not (tmp_path / "chosen" / "imatrix.gguf").exists()


def test_dense_models_too(
    run_cli: Any, calibration: tuple[object, ...], dense: Callable[..., Path], tmp_path: Path
) -> None:
    path = dense("llama", hidden_size=256, intermediate_size=256)
    result = export(run_cli, path, tmp_path / "out", *calibration, "--type", "q4_k")
    assert result.code == 0, result.stderr
    found = types(tmp_path / "out" / "model.gguf")
    assert {found["blk.0.ffn_down.weight"], found["blk.0.attn_output.weight"]} == {"Q4_K"}


def test_a_killed_export_continues(
    crash: Any, calibration: tuple[object, ...], tiny_mixtral: Path, tmp_path: Path
) -> None:
    """In the middle; the result is the same to the byte."""
    arguments = ("export", tiny_mixtral, "--format", "gguf", "--type", "q4_0", *calibration)
    told = crash(tmp_path / "whole", arguments)
    assert told["code"] == 0, told["stderr"]
    assert crash(tmp_path / "out", arguments, at=told["changes"] // 2)["code"] == -signal.SIGKILL
    again = crash(tmp_path / "out", (*arguments, "--resume"))
    assert again["code"] == 0, again["stderr"]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
