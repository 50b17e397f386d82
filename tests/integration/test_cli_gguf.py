"""`export --format gguf`: what the file holds, by the library's own reader, and what llama.cpp makes of it."""

import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_config, copy_of, load, tensors_of
from families import build
from safetensors.torch import save_file
from sampling import sampled
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, processors
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moetool.architectures import Role
from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes
from moetool.costs.calibration_cost import baseline
from moetool.format.gguf.words import interleaved
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


def test_matrices_stand_for_codes_beside_experts(run_cli: Any, models: dict[str, Path], tmp_path: Path) -> None:
    options = ("--method", "quantize", "--bits", 8, "--rounding", "nearest", "--group-size", 16)
    include = ("--include", "attention,embeddings")
    assert run_cli("compress", models["mixtral"], "--method", "d2moe", tmp_path / "small", *options, *include).code == 0
    result = export(run_cli, tmp_path / "small", tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    assert run_cli("export", tmp_path / "small", tmp_path / "dense").code == 0
    found, dense = stored(tmp_path / "out" / "model.gguf"), tensors_of(tmp_path / "dense")
    for own, name in {"token_embd": "embed_tokens", "blk.1.attn_v": "layers.1.self_attn.v_proj"}.items():
        assert torch.equal(found[f"{own}.weight"], dense[f"model.{name}.weight"])


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


def test_types_and_the_plan(run_cli: Any, models: dict[str, Path], tmp_path: Path) -> None:
    """Rows that are no whole blocks become fp16, and that is said; embeddings keep 8 bits, routers all."""
    options = "--type", "q8_0", "--experts-type", "q4_0"
    result = export(run_cli, models["mixtral"], tmp_path / "out", *options)
    plan = export(run_cli, models["mixtral"], tmp_path / "none", *options, "--dry-run")
    assert plan.json["output_bytes"] == result.json["bytes_after"]
    assert "whole blocks" in result.stderr
    types = {
        tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors
    }
    named = {name: types[f"blk.0.{name}.weight"] for name in ("attn_q", "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp")}
    assert named == {"attn_q": "Q8_0", "ffn_up_exps": "Q4_0", "ffn_down_exps": "F16", "ffn_gate_inp": "F32"}
    own, found = tensors_of(models["mixtral"]), stored(tmp_path / "out" / "model.gguf")
    embeddings = own["model.embed_tokens.weight"]
    assert (found["token_embd.weight"] - embeddings).norm() < 0.01 * embeddings.norm()


def test_without_the_library_it_is_named(
    run_cli: Any, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    result = export(run_cli, models["mixtral"], tmp_path / "out")
    assert result.code == 2
    assert "pip install moetool[gguf]" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_pieces(run_cli: Any, models: dict[str, Path], tmp_path: Path) -> None:
    """As SentencePiece makes them: bytes that stand for what has no piece, and an order of merges."""
    path = copy_of(models["mixtral"], tmp_path / "in")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    merges = [("a", "b"), ("▁", "ab")]
    inner = Tokenizer(
        BPE({piece: token for token, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **marks).save_pretrained(path)
    exported = export(run_cli, path, tmp_path / "out")
    assert exported.code == 0
    assert "changes some texts" not in exported.stderr
    found = fields(tmp_path / "out" / "model.gguf")
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("llama", "default")
    assert found["tokenizer.ggml.add_bos_token"]
    assert found["tokenizer.ggml.add_space_prefix"]
    assert found["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    scores = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True))
    assert scores["ab"] > scores["▁ab"]
    text = "ab abc"
    back = load_tokenizer(Checkpoint.open(tmp_path / "out" / "model.gguf").path)
    assert back(text)["input_ids"] == load_tokenizer(path)(text)["input_ids"]
    for changing in (normalizers.Replace(Regex(" {2,}"), " "), normalizers.NFKC()):
        inner.normalizer = normalizers.Sequence([changing, normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        PreTrainedTokenizerFast(tokenizer_object=inner, **marks).save_pretrained(path)
        told = export(run_cli, path, tmp_path / "out", "--overwrite").stderr
        assert "changes some texts before it cuts them" in told


@pytest.mark.parametrize(("folder", "strips", "name"), [("my-Phi-3", 0, "my-phi 3"), ("chat", 4, "chat-phi-3")])
def test_the_name_says_whether_special_tokens_take_spaces(
    run_cli: Any, models: dict[str, Path], tmp_path: Path, folder: str, strips: int, name: str
) -> None:
    """llama.cpp tells that from the name alone, and does not load a Phi-3 that lacks four tokens."""
    path = copy_of(models["mixtral"], tmp_path / folder)
    tokenizer = load_tokenizer(path)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "<|endoftext|>")])
    tokenizer.add_tokens(
        [AddedToken(text, special=True, rstrip=True) for text in ("</s>", "<a>", "<b>", "<c>")[:strips]]
    )
    tokenizer.save_pretrained(path)
    assert export(run_cli, path, tmp_path / "out").code == 0
    assert fields(tmp_path / "out" / "model.gguf")["general.name"] == name
    if find_spec("llama_cpp"):
        from llama_cpp import Llama

        llama = Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
        tokens = llama.tokenize(b"<c> a", add_bos=False, special=True)
        assert tokens == tokenizer("<c> a", add_special_tokens=False)["input_ids"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files that are inputs are converted to."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("family", sampled(MODELS, ("mixtral", "olmoe", "granitemoeshared")))
def test_a_file_is_an_input(
    run_cli: Any, models: dict[str, Path], tmp_path: Path, family: str, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """There and back again: the same tensors, numbers of the config, and tokens."""
    export(run_cli, models[family], tmp_path / "out", "--type", "f32")
    back = Checkpoint.open(tmp_path / "out" / "model.gguf")
    before, after = tensors_of(models[family]), {name: back.read(name) for name in back.tensors}
    assert family == "olmoe" or before.keys() == after.keys()  # its tied head is there a second time
    assert all(torch.equal(after[name], before[name]) for name in before)
    text = "Tokens 12, and “others”."
    assert load_tokenizer(back.path)(text)["input_ids"] == tiny_tokenizer(text)["input_ids"]
    tokens = torch.arange(5, 45)[None]
    assert torch.allclose(load(back.path)(tokens).logits, load(models[family])(tokens).logits, atol=1e-5)


def test_a_file_is_compared_with_what_it_was_made_of(
    run_cli: Any, models: dict[str, Path], tmp_path: Path, tiny_text: Path
) -> None:
    """It has the same tokens: neither names of embeddings that no token uses, nor GPT-2's if the file has none."""
    source = models["mixtral"]
    export(run_cli, source, tmp_path / "out", "--type", "f32")
    file = tmp_path / "out" / "model.gguf"
    tokens = load_tokenizer(Checkpoint.open(file).path)
    assert tokens.get_vocab() == load_tokenizer(source).get_vocab()
    text = tmp_path / "text.txt"
    text.write_text(f"{tiny_text.read_text(encoding='utf-8')[:2000]} <|endoftext|>", encoding="utf-8")
    result = run_cli("eval", file, "--data", text, "--against", source, "--sequence-length", 32, "--json")
    assert result.code == 0, result.stderr
    assert result.json["against"]["kl"] < 1e-6
    refused = run_cli("export", file, tmp_path / "whole")
    assert f"error: {file} is not a moetool checkpoint: it is in its original layout. For other" in refused.stderr


@pytest.mark.parametrize("family", sampled(("llama", "mistral", "qwen2", "qwen3", "granite"), ("llama", "qwen2")))
def test_a_dense_file_is_an_input(run_cli: Any, dense: Callable[..., Path], tmp_path: Path, family: str) -> None:
    own = dense(family)
    export(run_cli, own, tmp_path / "out", "--type", "bf16")
    back, before = Checkpoint.open(tmp_path / "out" / "model.gguf"), tensors_of(own)
    assert set(back.tensors) == set(before)
    assert all(torch.equal(back.read(name), tensor.bfloat16()) for name, tensor in before.items())
    rope = {key: back.config["rope_parameters"][key] for key in ("rope_type", "rope_theta")}  # type: ignore[index]
    assert rope == {key: load(own).config.rope_parameters[key] for key in rope}


def test_commands_take_a_file(run_cli: Any, models: dict[str, Path], tmp_path: Path) -> None:
    export(run_cli, models["mixtral"], tmp_path / "out", "--type", "q8_0")
    file = tmp_path / "out" / "model.gguf"
    plan = run_cli("compress", file, tmp_path / "none", "--method", "quantize", "--bits", 8, "--dry-run", "--json")
    assert plan.code == 0, plan.stderr
    result = run_cli("compress", file, tmp_path / "small", "--method", "quantize", "--bits", 8, "--json")
    assert result.code == 0, result.stderr


def test_files_that_cannot_be_read(run_cli: Any, models: dict[str, Path], tmp_path: Path) -> None:
    export(run_cli, models["mixtral"], tmp_path / "out")
    whole = (tmp_path / "out" / "model.gguf").read_bytes()
    for name, content in {"cut": whole[:-1000], "stub": whole[:100], "text": b"no model", "empty": b""}.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        result = run_cli("inspect", file)
        assert result.code == 3, result.stderr
        assert file.name in result.stderr
    key = b"llama.block_count" + (4).to_bytes(4, "little")  # and then the number, in 32 bits
    at = whole.index(key) + len(key)
    for layers in (1, 2**31 - 1):
        (tmp_path / "layers.gguf").write_bytes(whole[:at] + layers.to_bytes(4, "little") + whole[at + 4 :])
        result = run_cli("inspect", tmp_path / "layers.gguf")
        assert result.code == 3
        assert f"says that it has {layers} layers" in result.stderr
    (tmp_path / "odd.gguf").write_bytes(whole.replace(b"llama", b"mamba"))
    result = run_cli("inspect", tmp_path / "odd.gguf")
    assert result.code == 3
    assert f"{tmp_path / 'odd.gguf'} cannot be an input. " in result.stderr
    assert "moetool reads" in result.stderr


def test_a_small_model_is_planned_as_small(run_cli: Any, models: dict[str, Path], tmp_path: Path) -> None:
    """Beside Python and its libraries, parts of its own tensors, not of the largest that are written in parts."""
    plan = export(run_cli, models["mixtral"], tmp_path / "out", "--dry-run").json
    assert baseline() < plan["peak_memory_bytes"] < baseline() + 10_000_000


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("qwen2_moe", {"norm_topk_prob": True}, "not idle"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen2_moe", {"rope_parameters": LONG}, "longrope"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    run_cli: Any, models: dict[str, Path], tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    result = export(run_cli, change_config(copy_of(models[family], tmp_path / "in"), **changes), tmp_path / "out")
    assert result.code == 3
    assert said in result.stderr
    assert not (tmp_path / "out" / "model.gguf").exists()


def test_compressed_experts_are_decoded(
    run_cli: Any, compress: Callable[..., Any], tiny_mixtral: Path, tmp_path: Path
) -> None:
    small = compress(tiny_mixtral, "--method", "quantize", "--bits", 4).path
    result = export(run_cli, small, tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    found, source = stored(tmp_path / "out" / "model.gguf"), Source.open(small)
    assert torch.equal(found["blk.1.ffn_up_exps.weight"][2], source.experts.dense(1, 2, "up"))
    told, original = result.json, Checkpoint.open(tiny_mixtral).weight_bytes
    assert (told["bytes_before"], told["bytes_input"]) == (original, source.checkpoint.weight_bytes)
    assert told["achieved_ratio"] == round(1 - told["bytes_after"] / original, 6)


def agree(run_cli: Any, path: Path, target: Path) -> None:
    """llama.cpp's logits of a model are transformers'."""
    from llama_cpp import Llama

    result = export(run_cli, path, target, "--type", "f32")
    assert result.code == 0, result.stderr
    tokens = torch.randint(288, (48,), generator=torch.Generator().manual_seed(0))
    model = Llama(str(target / "model.gguf"), n_ctx=64, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
    model.eval(tokens.tolist())
    found = torch.from_numpy(model.scores[:48].copy())
    model.close()
    expected = load(path)(tokens[None]).logits[0]
    assert (found - expected).norm() < 1e-3 * expected.norm()


with_llama_cpp = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="wants llama-cpp-python, which compiles llama.cpp"
)


@with_llama_cpp
@pytest.mark.parametrize("family", MODELS)
def test_llama_cpp_computes_the_same(run_cli: Any, models: dict[str, Path], tmp_path: Path, family: str) -> None:
    agree(run_cli, models[family], tmp_path / "out")


@with_llama_cpp
@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3", "granite"])
def test_llama_cpp_computes_the_same_of_dense_models(
    run_cli: Any, dense: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    slowed = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    changes: dict[str, dict[str, Any]] = {
        "llama3": {"rope_parameters": {**slowed, "original_max_position_embeddings": 16}},
        "mistral": {"sliding_window": None},
    }
    own = "llama" if family == "llama3" else family
    agree(run_cli, dense(own, **changes.get(family, {})), tmp_path / "out")


def test_a_window_that_llama_cpp_does_not_keep_to_is_told(
    run_cli: Any, dense: Callable[..., Path], tmp_path: Path
) -> None:
    assert "window of 8 tokens" in export(run_cli, dense("mistral"), tmp_path / "out").stderr


def test_an_upcycled_qwen2_is_a_mixtral_with_biases(
    run_cli: Any, dense: Callable[..., Path], upcycle: Callable[..., Any], tmp_path: Path
) -> None:
    """Its routing weights add up to one, which llama.cpp's qwen2moe does not compute, and its shared expert is idle."""
    mixture = upcycle(dense("qwen2"), "--experts", 4, "--top-k", 2).path
    assert export(run_cli, mixture, tmp_path / "out", "--type", "f32").code == 0
    assert fields(tmp_path / "out" / "model.gguf")["general.architecture"] == "llama"
    if find_spec("llama_cpp") is not None:
        agree(run_cli, mixture, tmp_path / "again")
    trained, kept = copy_of(mixture, tmp_path / "trained"), tensors_of(mixture)
    kept["model.layers.0.mlp.shared_expert.down_proj.weight"] += 1
    save_file(kept, trained / "model.safetensors", {"format": "pt"})
    result = export(run_cli, trained, tmp_path / "refused")
    assert result.code == 3
    assert "tune --train experts" in result.stderr


def test_a_plan_refuses_shared_experts_that_are_not_idle(run_cli: Any, tmp_path: Path) -> None:
    """Random ones beside routing weights that add up to one."""
    build("qwen2_moe", mlp_only_layers=[], norm_topk_prob=True).save_pretrained(tmp_path / "busy")
    result = export(run_cli, tmp_path / "busy", tmp_path / "out", "--dry-run")
    assert result.code != 0
    assert "shared_expert.down_proj.weight is not zero" in result.stderr


def test_files_are_converted_again_by_another_moetool(
    run_cli: Any, models: dict[str, Path], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """What an earlier one made of them is not taken, and said to be there."""
    export(run_cli, models["mixtral"], tmp_path / "out")
    file = tmp_path / "out" / "model.gguf"
    first = Checkpoint.open(file)
    assert Checkpoint.open(file).path == first.path
    assert not caplog.records
    assert {path.stat().st_mtime_ns for path in first.weight_files} == {file.stat().st_mtime_ns}
    assert {path.stat().st_mode & 0o777 for path in first.weight_files} == {file.stat().st_mode & 0o777}
    monkeypatch.setattr("moetool.checkpoint.gguf.__version__", "0.0.1")
    second = Checkpoint.open(file)
    assert second.path != first.path
    assert second.fingerprint() == first.fingerprint()
    (record,) = caplog.records
    assert f"rm -r {first.path}" in record.getMessage()
    assert f"of earlier conversions of {file} are" in record.getMessage()


def test_conversions_of_other_files_of_that_name_are_no_earlier_ones(
    run_cli: Any, models: dict[str, Path], tmp_path: Path, cache: Path, caplog: Any
) -> None:
    for family in ("mixtral", "olmoe"):
        export(run_cli, models[family], tmp_path / family)
        assert Checkpoint.open(tmp_path / family / "model.gguf").path.is_relative_to(cache)
    assert not caplog.records


def test_the_directory_of_an_export_is_verified(run_cli: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    """Its digests, and the file read back; there is nothing to compare bit for bit with what it was made from."""
    out = tmp_path / "out"
    assert export(run_cli, tiny_mixtral, out).code == 0
    found = run_cli("verify", out, "--json")
    assert found.code == 0, found.stderr
    assert found.json["tensors"] == run_cli("verify", out / "model.gguf", "--json").json["tensors"]
    for given in (out, out / "model.gguf"):
        assert "this GGUF file of" in run_cli("inspect", given).stdout
    assert found.json["bytes"] == (out / "model.gguf").stat().st_size
    for given in (out, out / "model.gguf"):
        told = run_cli("report", given, tmp_path / "page.html", "--json").json
        assert [step["stage"] for step in told["made"]["steps"]] == ["gguf"]
        assert (told["jobs"][0]["stage"], "notes" in told) == ("gguf", False)
        assert "<h1>out</h1>" in (tmp_path / "page.html").read_text()
    for given in (out, out / "model.gguf", shutil.copy(out / "model.gguf", tmp_path / "theirs.gguf")):
        refused = run_cli("verify", given, "--against", tiny_mixtral)
        assert refused.code == 2
        assert "moetool eval" in refused.stderr
    with (out / "README.md").open("a") as card:
        card.write("more")
    assert run_cli("verify", out).code == 5
    assert run_cli("verify", out / "model.gguf").code == 5


def test_sizes_are_those_of_the_file(run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Beside others in a table, and where what is made of the file is larger than that."""
    out = tmp_path / "out"
    assert export(run_cli, tiny_mixtral, out, "--type", "q4_0").code == 0
    file = out / "model.gguf"
    words = (
        "--models",
        file,
        "--data",
        tiny_text,
        "--sequence-length",
        32,
        "--windows",
        2,
        "--work",
        tmp_path / "work",
    )
    compared = run_cli("compare", tiny_mixtral, *words, "--json")
    assert compared.code == 0, compared.stderr
    [row] = compared.json["rows"]
    assert row["bytes"] == file.stat().st_size
    planned = run_cli("compress", file, tmp_path / "new", "--method", "quantize", "--bits", 8, "--dry-run", "--json")
    assert planned.code == 0, planned.stderr
    assert "in GGUF: nothing is saved" in planned.json["note"]
    nbytes, read = file.stat().st_size, Checkpoint.open(file).weight_bytes
    assert (planned.json["gguf_bytes"], planned.json["input_bytes"]) == (nbytes, read)
    made = run_cli("compress", file, tmp_path / "new", "--method", "quantize", "--bits", 8, "--json")
    assert (made.json["gguf_bytes"], made.json["bytes_before"]) == (nbytes, read)
    said = f"as read from a GGUF file of {format_bytes(nbytes)}"
    assert f"| source {said} | {format_bytes(read)} |" in (tmp_path / "new" / "README.md").read_text()
    resumed = run_cli("compress", file, tmp_path / "new", "--method", "quantize", "--bits", 8, "--resume")
    assert f"{format_bytes(nbytes)} in GGUF, read as {format_bytes(read)} → " in resumed.stdout
    exported = export(run_cli, file, tmp_path / "again")
    assert (exported.json["gguf_bytes"], exported.json["bytes_before"]) == (nbytes, read)
    assert run_cli("report", file, tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert said in page
    assert f"in GGUF, read as {format_bytes(read)}" in page
    assert run_cli("inspect", file, "--json").json["gguf_bytes"] == nbytes
    of_it = run_cli("compare", file, "--models", tiny_mixtral, *words[2:])
    assert f"{format_bytes(read)} {said}, windows" in of_it.stdout
    assert f" {format_bytes(read)} {said}\n" in run_cli("recommend", file, "--memory", "4GB").stdout
    benched = run_cli("bench", file, "--lengths", 4, "--new-tokens", 1, "--rounds", 1, "--json")
    assert benched.json["model"]["file_bytes"] == nbytes
