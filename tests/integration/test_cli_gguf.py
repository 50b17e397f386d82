"""`export --format gguf`: what the file holds, by the library's own reader, and what llama.cpp makes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tensors_of
from families import build
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moetool.architectures import Role
from moetool.format.gguf import interleaved
from moetool.job.job import Source

gguf = pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")

# That llama.cpp computes: no layers without experts, and the heads and routers that it has.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "olmoe": {"num_key_value_heads": 4, "norm_topk_prob": False},
    "granitemoe": {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "logits_scaling": 1.5},
    "granitemoeshared": {},
}
TURNED = ("mixtral", "granitemoe", "granitemoeshared")
HEADS = 4


@pytest.fixture(scope="session")
def models(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of every family, with a tokenizer."""
    made = {}
    for family, overrides in MODELS.items():
        path = tmp_path_factory.mktemp("gguf") / family
        build(family, **{"vocab_size": 320, **overrides}).save_pretrained(path)
        tiny_tokenizer.save_pretrained(path)
        made[family] = path
    return made


def export(run_cli: Any, source: Path, target: Path, *options: object) -> Any:
    return run_cli("export", source, target, "--format", "gguf", *options, "--json")


def stored(file: Path) -> dict[str, Tensor]:
    """Every tensor of a file, in fp32, as torch has it."""
    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).view(
            *reversed(tensor.shape.tolist())
        )
        for tensor in gguf.GGUFReader(file).tensors
    }


def fields(file: Path) -> dict[str, Any]:
    """Its metadata."""
    return {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("family", MODELS)
def test_the_file_holds_what_the_checkpoint_holds(
    run_cli: Any, models: dict[str, Path], tmp_path: Path, family: str
) -> None:
    result = export(run_cli, models[family], tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    found, before = stored(tmp_path / "out" / "model.gguf"), tensors_of(models[family])
    source = Source.open(models[family])
    names: dict[str, Role] = {"gate": "gate", "up": "up", "down": "down"}
    for layer in source.experts.moe_layers:
        for name, role in names.items():
            whole = found[f"blk.{layer}.ffn_{name}_exps.weight"]
            for expert in range(source.experts.shape.experts):
                assert torch.equal(whole[expert], source.experts.dense(layer, expert, role))
        for part, heads in (("q", HEADS), ("k", 4 if family == "olmoe" else 2)):
            own = before[f"model.layers.{layer}.self_attn.{part}_proj.weight"]
            expected = interleaved(own, heads) if family in TURNED else own
            assert torch.equal(found[f"blk.{layer}.attn_{part}.weight"], expected)
        assert torch.equal(found[f"blk.{layer}.ffn_gate_inp.weight"], before[source.architecture.router_name(layer)])
    assert torch.equal(found["token_embd.weight"], before["model.embed_tokens.weight"])


def test_metadata_and_tokenizer(
    run_cli: Any, models: dict[str, Path], tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    export(run_cli, models["mixtral"], tmp_path / "out")
    found = fields(tmp_path / "out" / "model.gguf")
    assert found["general.architecture"] == "llama"
    assert (found["llama.block_count"], found["llama.expert_count"], found["llama.expert_used_count"]) == (3, 4, 2)
    assert (found["llama.attention.head_count"], found["llama.attention.head_count_kv"]) == (4, 2)
    assert (found["llama.feed_forward_length"], found["llama.rope.dimension_count"]) == (48, 8)
    assert found["tokenizer.ggml.model"] == "gpt2"
    tokens = found["tokenizer.ggml.tokens"]
    assert len(tokens) == 320
    assert all(tokens[token] == text for text, token in tiny_tokenizer.get_vocab().items())
