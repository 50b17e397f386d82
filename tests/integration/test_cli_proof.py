"""The last check of every job: a layer of its result, loaded by transformers, against what its files stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents, load_whole
from sampling import sampled
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from moetool.checkpoint.gguf_model import GgufModel
from moetool.export.gguf.model import GgufSource
from moetool.format.gguf.words import interleaved
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.quantized import QuantizedLinear

BOTH = ("--include", "attention,embeddings")
METHODS = {
    "d2moe": ("--ratio", 0.3),
    "d2moe-semi-dynamic": ("--method", "d2moe", "--ratio", 0.3, "--pruning", "semi-dynamic"),
    "quantize": ("--method", "quantize", "--bits", 3, "--group-size", 16),
    "trellis": ("--method", "quantize", "--bits", 2, "--group-size", 16, "--trellis", *BOTH),
    "hybrid": ("--method", "hybrid", "--ratio", 0.6),
    "auto": ("--method", "auto", "--ratio", 0.6),
    "reap": ("--method", "reap", "--experts", 2),
}


@pytest.mark.parametrize("method", sampled(METHODS, ("d2moe-semi-dynamic", "trellis", "hybrid", "reap")))
def test_a_layer_is_loaded_and_gives_what_the_files_stand_for(
    compress: Any, tiny_mixtral_bf16: Path, method: str
) -> None:
    options = METHODS[method] if "--method" in METHODS[method] else ("--method", method, *METHODS[method])
    loaded = compress(tiny_mixtral_bf16, *options).told["loaded"]
    assert 0 <= loaded["layer"] < 3
    assert loaded["relative_error"] <= 1e-5


def test_upcycled_and_exported_models_are_loaded(
    run_cli: Any, compress: Any, dense: Any, tiny_mixtral: Path, tmp_path: Path
) -> None:
    upcycled = run_cli("upcycle", dense("llama"), tmp_path / "mixture", "--experts", 4, "--json")
    assert upcycled.json["loaded"]["relative_error"] <= 1e-5
    small = compress(tiny_mixtral, *METHODS["quantize"]).path
    exported = run_cli("export", small, tmp_path / "dense", "--format", "dense-experts", "--json")
    assert exported.json["loaded"]["relative_error"] <= 1e-5
    plain = run_cli("export", tmp_path / "mixture", tmp_path / "expert", "--format", "dense", "--expert", 0, "--json")
    assert plain.json["loaded"] == {"layer": 0}  # a dense model: names and shapes


UNKNOWN = {
    "mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 32},
    "bitnet": {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "llama4_text": {"intermediate_size": 48, "intermediate_size_mlp": 48, "num_attention_heads": 4, "head_dim": 8,
                    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", sampled(UNKNOWN, ("mamba", "llama4_text")))
def test_models_that_only_tune_takes_are_loaded_by_their_names(
    run_cli: Any, save_model: Any, tiny_text: Path, tmp_path: Path, family: str
) -> None:
    """Of which moetool knows neither networks nor experts."""
    config = AutoConfig.for_model(family, vocab_size=288, hidden_size=32, num_hidden_layers=2, **UNKNOWN[family])
    source = save_model(AutoModelForCausalLM.from_config(config), tmp_path / "model")
    options = ("--data", tiny_text, "--steps", 1, "--batch-size", 1, "--sequence-length", 32)
    tuned = run_cli("tune", source, tmp_path / "tuned", *options, "--json")
    assert tuned.code == 0, tuned.stderr
    assert tuned.json["loaded"] == {"layer": 0}
    load_whole(tmp_path / "tuned")


def _refused(run_cli: Any, source: Path, output: Path, calibration: Any, *options: object) -> str:
    result = run_cli("compress", source, "--method", "d2moe", output, *calibration, *options)
    assert result.code == 5, result.stderr
    assert not (output / "config.json").exists()
    assert not (output / "model.safetensors.index.json").exists()
    return str(result.stderr)


def test_a_result_that_runs_as_something_else_is_refused(
    run_cli: Any, tiny_mixtral: Path, calibration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the run time forgot the base of one matrix."""
    forgets = SharedBaseExperts._uses_base
    monkeypatch.setattr(
        SharedBaseExperts,
        "_uses_base",
        lambda self, expert, role: (expert, role) != (1, "up") and forgets(self, expert, role),
    )
    options = ("--method", "ders-quantize", "--bits", 4, "--group-size", 16)
    said = _refused(run_cli, tiny_mixtral, tmp_path / "out", calibration, *options)
    assert "the experts of layer" in said
    monkeypatch.undo()
    resumed = run_cli(
        "compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", *calibration, *options, "--resume", "--json"
    )
    assert resumed.code == 0, resumed.stderr
    straight = run_cli(
        "compress",
        tiny_mixtral,
        "--method",
        "d2moe",
        tmp_path / "straight",
        *calibration,
        *options,
        "--no-proof",
        "--json",
    )
    assert "loaded" not in straight.json
    assert contents(tmp_path / "straight") == contents(tmp_path / "out")


def test_codes_beside_the_experts_are_compared(
    run_cli: Any, tiny_mixtral: Path, calibration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = QuantizedLinear.forward
    monkeypatch.setattr(QuantizedLinear, "forward", lambda self, inputs: 1.001 * right(self, inputs))
    said = _refused(run_cli, tiny_mixtral, tmp_path / "out", calibration, *METHODS["trellis"])
    assert "self_attn.q_proj" in said


def test_a_result_that_does_not_load_is_refused(
    run_cli: Any, tiny_mixtral: Path, calibration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if modules of codes had a tensor more than is written."""
    made = QuantizedLinear.__init__

    def larger(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self.more = torch.nn.Parameter(torch.zeros(2, device=self.weight.device))

    monkeypatch.setattr(QuantizedLinear, "__init__", larger)
    said = _refused(run_cli, tiny_mixtral, tmp_path / "out", calibration, *METHODS["trellis"])
    assert "transformers would not load this result" in said


def test_a_layer_that_does_not_fit_is_checked_by_its_shapes(
    run_cli: Any, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetool.job.proof.free_bytes", lambda: 1000)
    result = run_cli(
        "compress", tiny_mixtral, tmp_path / "out", *METHODS["quantize"], "--rounding", "nearest", "--json"
    )
    assert result.code == 0, result.stderr
    assert "only names and shapes" in result.stderr
    assert result.json["loaded"].keys() == {"layer"}


def test_a_gguf_file_is_read_back(run_cli: Any, dense: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if keys were turned for as many heads as queries have, which was so once where config.json left them out."""
    source = dense("llama")
    export = ("--format", "gguf", "--type", "q8_0", "--json")
    found = run_cli("export", source, tmp_path / "out", *export).json["loaded"]
    assert found["layer"] == 0
    assert 1e-4 < found["relative_error"] < 2e-2
    heads = GgufModel.heads.func(GgufModel(tmp_path / "out" / "model.gguf"))
    assert heads == (4, 2)

    def turned(_: GgufSource, name: str, rows: Tensor) -> Tensor:
        return interleaved(rows, 4) if "attn_q." in name or "attn_k." in name else rows

    monkeypatch.setattr(GgufSource, "turned", turned)
    result = run_cli("export", source, tmp_path / "wrong", *export)
    assert result.code == 5, result.stderr
    assert "self_attn.k_proj" in result.stderr
    assert not (tmp_path / "wrong" / "model.gguf").exists()
