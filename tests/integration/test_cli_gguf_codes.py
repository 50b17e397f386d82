"""`export --format gguf` in types whose codes are chosen on a text."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load
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


@pytest.mark.parametrize("number", sampled(["q2_k", "q3_k", "iq3_xxs"], ["iq3_xxs"]))
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


@pytest.mark.parametrize("option", sampled(["--type q4_0", "--target-bpw 9"], ["--target-bpw 9"]))
def test_a_killed_export_continues(
    crash: Any, calibration: tuple[object, ...], tiny_mixtral: Path, tmp_path: Path, option: str
) -> None:
    """In the middle; the result is the same to the byte."""
    arguments = ("export", tiny_mixtral, "--format", "gguf", *option.split(), *calibration)
    changes = crash.whole(tmp_path / "whole", arguments)
    crash.goes_on(tmp_path / "out", arguments, changes // 2, tmp_path / "whole")


def test_what_written_layers_were_coded_from_is_not_missed(
    crash: Any, calibration: tuple[object, ...], tiny_mixtral: Path, tmp_path: Path
) -> None:
    """A job that was killed when some layers were in the output makes nothing again but what it was at."""
    arguments = ("export", tiny_mixtral, "--format", "gguf", "--target-bpw", 9, *calibration)
    changes = crash.whole(tmp_path / "whole", arguments)
    for left in (8, 16, 24):
        output = tmp_path / str(left)
        assert crash(output, arguments, at=changes - left)["code"] == -signal.SIGKILL
        again = crash(output, (*arguments, "--resume"))
        assert again["code"] == 0, again["stderr"]
        assert "damaged" not in again["stderr"]


@pytest.fixture(scope="module")
def one_type(run_cli: Any, calibration: tuple[object, ...], wide: Path, tmp_path_factory: Any) -> Path:
    """An export in one type for all layers."""
    target: Path = tmp_path_factory.mktemp("one") / "out"
    assert export(run_cli, wide, target, "--type", "q3_k", *calibration).code == 0
    return target / "model.gguf"


@pytest.fixture(scope="module")
def sized(
    run_cli: Any, calibration: tuple[object, ...], wide: Path, one_type: Path, tmp_path_factory: Any
) -> tuple[Path, Any]:
    """An export of that size whose types are chosen, and what it says."""
    target = tmp_path_factory.mktemp("sized") / "out"
    result = export(run_cli, wide, target, *calibration, "--size", one_type.stat().st_size, "--json")
    assert result.stderr.count("Calibration on") == 1  # one text, for choosing types and for choosing codes
    assert result.code == 0, result.stderr
    return target, result.json


def test_types_are_chosen_for_a_size(run_cli: Any, wide: Path, one_type: Path, sized: tuple[Path, Any]) -> None:
    (target, told), most = sized, one_type.stat().st_size
    size = (target / "model.gguf").stat().st_size
    assert 0.95 * most < size <= most
    found = types(target / "model.gguf")
    assert {name: kind.upper() for name, kind in told["types"].items()} == found
    assert len({kind for name, kind in found.items() if "blk" in name} - {"F32"}) > 2
    tensors = gguf.GGUFReader(target / "model.gguf").tensors
    bits = 8 * sum(int(tensor.n_bytes) for tensor in tensors) / sum(int(tensor.n_elements) for tensor in tensors)
    assert told["bits_per_weight"] == pytest.approx(bits, abs=1e-3)
    assert f"- layer 0: attn_k {told['types']['blk.0.attn_k.weight']}, " in (target / "README.md").read_text()
    planned = run_cli("export", wide, target.parent / "no", "--format", "gguf", "--size", most, "--dry-run", "--json")
    assert planned.code == 0, planned.stderr
    assert size <= planned.json["output_bytes"] <= most


def test_a_mixture_of_llama_quantize_is_its_bits_per_weight(run_cli: Any, wide: Path, tmp_path: Path) -> None:
    """In whatever case its name is typed."""
    words = ("export", wide, tmp_path / "out", "--format", "GGUF", "--dry-run", "--json")
    plans = [run_cli(*words, *typed).json for typed in (("--type", "Q5_K_M"), ("--target-bpw", 5.7))]
    assert plans[0] == plans[1]
    assert run_cli(*words, "--type", "Q5_K").json == run_cli(*words, "--type", "q5_k").json != plans[0]


def test_chosen_types_lose_less_than_one_for_all(
    wide: Path,
    tiny_text: Path,
    one_type: Path,
    sized: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    windows = sample_windows(str(tiny_text), load_tokenizer(wide), samples=16, sequence_length=32, seed=0)
    assert divergence(sized[0] / "model.gguf", wide, windows) < divergence(one_type, wide, windows)


@pytest.mark.exhaustive
def test_bits_per_weight_of_a_compressed_model_on_the_bundled_text(run_cli: Any, wide: Path, tmp_path: Path) -> None:
    assert run_cli("compress", wide, tmp_path / "in", "--method", "quantize", "--bits", 4).code == 0
    text = ("--samples", 8, "--sequence-length", 32)
    result = export(run_cli, tmp_path / "in", tmp_path / "out", "--target-bpw", 5, *text, "--json")
    assert result.code == 0, result.stderr
    assert 4.7 < result.json["bits_per_weight"] <= 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--size", "100KB"), "this model takes from"),
        (("--target-bpw", 2), "is less than this model can have"),
        (("--size", "1MB", "--target-bpw", 5), "not both"),
        (("--type", "q4_k_m", "--target-bpw", 5), "stands for --target-bpw 4.89: give one"),
        (("--type", "q4_k_m", "--experts-type", "q3_k"), "leave out --experts-type"),
        (("--size", "1MB", "--type", "q4_k"), "leave out --type"),
        (("--size", "1MB", "--experts-type", "q4_k"), "leave out --experts-type"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    run_cli: Any, wide: Path, tmp_path: Path, options: tuple[object, ...], said: str
) -> None:
    result = export(run_cli, wide, tmp_path / "out", *options)
    assert result.code == 2
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_mixture_that_cannot_be_is_refused_by_its_name(run_cli: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    result = export(run_cli, tiny_mixtral, tmp_path / "out", "--type", "q4_K_M")
    assert result.code == 2
    assert "--type q4_k_m, 4.89 bits per weight, is less than this model can have" in result.stderr
    assert "--target-bpw" not in result.stderr
