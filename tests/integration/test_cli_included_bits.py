"""Attention and embeddings in 5 and 6 bits beside experts: `compress … --include attention:6,embeddings:5`."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_config, config_of, contents, load_whole, logits, relative_error, tensors_of, weights
from torch import Tensor

from moetool.numerics.packing import packed_size, unpack
from moetool.numerics.quantization import dequantize
from moetool.runtime.modules.quantized import QuantizedEmbedding
from moetool.runtime.modules.quantized_in_model import quantized_modules

QUANTIZE = ("--method", "quantize", "--bits", 8, "--rounding", "nearest", "--group-size", 16)
MIXED = ("--include", "attention:6,embeddings:5")


def bits_of(path: Path) -> dict[str, int]:
    """Bits of every module beside the experts that is in codes."""
    listed = config_of(path)["quantization_config"]["beside"]
    return {name: int(spec.split(":")[1]) for name, spec in listed.items()}


def matrix_of(tensors: Mapping[str, Tensor], module: str, bits: int) -> Tensor:
    """The matrix that all codes of a module, decoded together, stand for."""
    codes, scales = tensors[f"{module}.moetool.codes"], tensors[f"{module}.moetool.scales"]
    count = len(codes) * 8 // bits
    assert packed_size(count, bits) == len(codes)
    return dequantize(unpack(codes, bits, count), scales, bits, torch.float32)


@pytest.fixture(scope="module")
def made(compress: Any, tiny_mixtral_bf16: Path) -> Path:
    path: Path = compress(tiny_mixtral_bf16, *QUANTIZE, *MIXED).path
    return path


def test_each_kind_has_its_bits(made: Path, tiny_mixtral_bf16: Path, run_cli: Any) -> None:
    found, before, after = bits_of(made), tensors_of(tiny_mixtral_bf16), tensors_of(made)
    assert len(found) == 14
    for name, bits in found.items():
        assert bits == (6 if "self_attn" in name else 5)
        error = relative_error(matrix_of(after, name, bits), before[f"{name}.weight"].float())
        assert 0.15 < error * 2**bits < 1.7
    assert run_cli("inspect", made, "--json").json["beside"]["bits"] == [5, 6]
    assert "14 projections and embeddings in 5 and 6 bits" in run_cli("inspect", made).stdout
    verified = run_cli("verify", made, "--against", tiny_mixtral_bf16, "--json")
    assert (verified.code, verified.json["rounded_tensors"]) == (0, 14)


def test_transformers_and_export_read_what_the_codes_stand_for(
    made: Path, run_cli: Any, tokens: Tensor, tmp_path: Path
) -> None:
    """By rows that are looked up, by products on codes, and by rows that are read from the files."""
    model, tensors = load_whole(made).float(), tensors_of(made)
    matrices = {name: matrix_of(tensors, name, bits) for name, bits in bits_of(made).items()}
    for name, module in quantized_modules(model):
        assert module.weight.float().equal(matrices[name])
        if isinstance(module, QuantizedEmbedding):
            assert module(tokens).equal(matrices[name][tokens])
        else:
            inputs = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                assert relative_error(module(inputs), inputs @ matrices[name].T) < 1e-5
    assert run_cli("export", made, tmp_path / "dense").code == 0
    dense = tensors_of(tmp_path / "dense")
    assert all(dense[f"{name}.weight"].equal(matrix.bfloat16()) for name, matrix in matrices.items())
    assert relative_error(model(tokens).logits, logits(tmp_path / "dense", tokens)) < 0.1


def test_saved_again_and_tuned(made: Path, run_cli: Any, tiny_text: Path, tokens: Tensor, tmp_path: Path) -> None:
    load_whole(made).save_pretrained(tmp_path / "again")
    assert logits(tmp_path / "again", tokens).equal(logits(made, tokens))
    short = ("--data", tiny_text, "--sequence-length", 32, "--batch-size", 2, "--steps", 2)
    assert run_cli("tune", made, tmp_path / "tuned", *short).code == 0
    assert bits_of(tmp_path / "tuned") == bits_of(made)


def test_rows_that_cannot_share_bytes_have_more_bits(
    compress: Any,
    make_mixtral: Any,
    save_model: Any,
    run_cli: Any,
    tokens: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = save_model(make_mixtral(vocab_size=292, dtype=torch.bfloat16), tmp_path / "model")
    options = (*QUANTIZE, "--include", "attention:5,embeddings:5")
    planned = run_cli("compress", source, tmp_path / "out", *options, "--dry-run", "--json").json
    assert planned["beside_experts"] == "attention in 5 bits and embeddings in 6 bits"
    made = compress(source, *options).path
    found = bits_of(made)
    assert (found["model.embed_tokens"], found["lm_head"], found["model.layers.0.self_attn.q_proj"]) == (6, 6, 5)
    assert relative_error(logits(made, tokens), logits(source, tokens)) < 0.3
    with monkeypatch.context() as patch:  # what a model with more in its embeddings is told
        asked = {"attention": 5, "embeddings": 5}
        patch.setattr("moetool.compress.mixing.stage.worth_including", lambda *_: asked)
        few = compress(source, "--method", "hybrid", "--group-size", 16, "--size", "69kB")
    (note,) = (note for note in few.told["notes"] if "--include" in note)
    assert "--include attention:5,embeddings:5 would store attention in 5 bits and embeddings in 6 bits" in note


@pytest.mark.parametrize(
    ("bits", "told"),
    [(5, "has shape [768], config.json promises [640]"), (7, "codes have 1, 2, 3"), (4, "is stored as")],
)
def test_a_config_that_does_not_fit_the_codes_is_refused(
    made: Path, run_cli: Any, bits: int, told: str, tmp_path: Path
) -> None:
    entry = config_of(made)["quantization_config"]
    entry["beside"]["model.layers.0.self_attn.q_proj"] = f"quantised-weight:{bits}:32"
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in made.iterdir():
        if file.name != "moetool.json" and file.is_file():
            (broken / file.name).write_bytes(file.read_bytes())
    result = run_cli("inspect", change_config(broken, quantization_config=entry))
    assert result.code == 3
    assert told in result.stderr


def test_killed_on_a_text_and_resumed_it_is_the_same(
    run_cli: Any, crash: Any, tiny_mixtral_bf16: Path, calibration: Any, tmp_path: Path
) -> None:
    options = ("--size", "70kB", "--group-size", 16, *MIXED, *calibration, "--shard-size", "25kB")
    assert run_cli("compress", tiny_mixtral_bf16, tmp_path / "undisturbed", *options).code == 0
    assert len(weights(tmp_path / "undisturbed")) > 2
    killed = crash(tmp_path / "killed", ("compress", tiny_mixtral_bf16, *options), at=60)
    assert killed["code"] == -signal.SIGKILL
    assert run_cli("compress", tiny_mixtral_bf16, tmp_path / "killed", *options, "--resume").code == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")


def test_a_plan_file_keeps_the_bits(run_cli: Any, tiny_mixtral_bf16: Path, calibration: Any, tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    options = ("compress", tiny_mixtral_bf16, *calibration, "--group-size", 16)
    made = run_cli(*options, tmp_path / "made", "--size", "70kB", *MIXED, "--save-plan", saved, "--json")
    assert made.code == 0
    assert "Also quantized: attention in 6 bits and embeddings in 5 bits." in made.json["notes"]
    assert "include: ['attention:6', 'embeddings:5']" in saved.read_text()
    assert run_cli(*options, tmp_path / "followed", "--plan", saved).code == 0
    assert bits_of(tmp_path / "followed") == bits_of(tmp_path / "made")
    saved.write_text(saved.read_text().replace("attention:6", "attention:7"))
    refused = run_cli(*options, tmp_path / "refused", "--plan", saved)
    assert refused.code == 3
    assert "attention can have 5, 6, 8 bits, not '7'" in refused.stderr
