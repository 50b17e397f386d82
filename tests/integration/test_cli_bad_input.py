"""Input that cannot be used: every mistake has its exit code, says what to do about it, and leaves nothing behind."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, change_config, change_tensors, contents, copy_of
from safetensors.torch import load_file
from transformers.models.mixtral.modeling_mixtral import MixtralAttention

EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


@pytest.fixture
def refused(run_cli, tmp_path) -> Callable[..., str]:
    """`refused(code, *arguments)` runs a command that must fail with that code and leave the directory of the test as
    it was; returns what it says in one line."""

    def run(code: int, *arguments: object) -> str:
        before = contents(tmp_path), {path for path in tmp_path.rglob("*") if path.is_dir()}
        result = run_cli(*arguments)
        assert result.code == code, (result.code, result.stderr)
        assert "Traceback" not in result.stderr
        assert result.stdout == ""
        assert before == (contents(tmp_path), {path for path in tmp_path.rglob("*") if path.is_dir()})
        last = result.stderr.splitlines()[-1]
        assert last.lower().startswith("error: ")
        assert last.endswith((".", "?", ")")) or code == 2
        return last

    return run


# -- the checkpoint


def missing(source: Path, target: Path) -> Path:
    return target


def empty(source: Path, target: Path) -> Path:
    target.mkdir()
    return target


def a_file(source: Path, target: Path) -> Path:
    return source / WEIGHTS


def without(*names: str) -> Callable[[Path, Path], Path]:
    def damage(source: Path, target: Path) -> Path:
        copy_of(source, target)
        for name in names:
            (target / name).unlink()
        return target

    return damage


def configured(**changes: Any) -> Callable[[Path, Path], Path]:
    return lambda source, target: change_config(copy_of(source, target), **changes)


def written(name: str, data: bytes) -> Callable[[Path, Path], Path]:
    def damage(source: Path, target: Path) -> Path:
        (copy_of(source, target) / name).write_bytes(data)
        return target

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path, Path], Path]:
    return lambda source, target: change_tensors(copy_of(source, target), change)


def truncated(source: Path, target: Path) -> Path:
    data = (source / WEIGHTS).read_bytes()
    (copy_of(source, target) / WEIGHTS).write_bytes(data[: len(data) // 2])
    return target


def only_pickles(source: Path, target: Path) -> Path:
    copy_of(source, target)
    (target / WEIGHTS).rename(target / "pytorch_model.bin")
    return target


DENSE = {"model_type": "llama", "num_local_experts": None, "num_experts_per_tok": None}
NO_FFN = "no tensor model.layers.0.mlp.gate_proj.weight, which its config.json promises (9 missing in all)"
UNKNOWN = {"model_type": "mixtralish", "num_local_experts": 4}
CHECKPOINTS = {
    "missing": (missing, ["No such directory", "bad"]),
    "empty": (empty, ["is empty", "config.json"]),
    "a file": (a_file, ["is a file", "directory"]),
    "no config": (without("config.json"), ["no config.json"]),
    "config that is no JSON": (written("config.json", b"{"), ["config.json", "not valid JSON"]),
    "config that is a list": (written("config.json", b"[]"), ["config.json", "object"]),
    "dense": (configured(**DENSE), ["not an MoE model", "moetool upcycle"]),
    "unknown family": (configured(**UNKNOWN), ["Unknown model family 'mixtralish'", "Did you mean mixtral"]),
    "no model type": (configured(model_type=None), ["Unknown model family", "mixtral"]),
    "no number of experts": (configured(num_local_experts=None), ["num_local_experts"]),
    "another number of experts": (configured(num_local_experts=6), ["experts.4", "6 experts"]),
    "fewer experts than there are": (configured(num_local_experts=3), ["[4, 32]", "[3, 32]"]),
    "more routed than there are": (configured(num_experts_per_tok=5), ["5 experts", "only 4"]),
    "another width": (configured(intermediate_size=64), ["shape [48, 32]", "[64, 32]"]),
    "more layers than there are": (configured(num_hidden_layers=4), ["model.layers.3", "missing"]),
    "fewer layers than there are": (configured(num_hidden_layers=2), ["model.layers.2.", "no place", "19 such"]),
    "pickles": (only_pickles, ["pickles", "pytorch_model.bin", "save_pretrained"]),
    "truncated": (truncated, ["truncated", WEIGHTS]),
    "not safetensors": (written(WEIGHTS, b"not safetensors at all"), [WEIGHTS]),
    "a pointer of Git LFS": (written(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), ["git lfs pull"]),
    "no tensor": (tensors(lambda t: t.pop(EXPERT)), [EXPERT, "missing"]),
    "no router": (tensors(lambda t: t.pop("model.layers.0.block_sparse_moe.gate.weight")), ["gate.weight", "missing"]),
    "wrong shape": (tensors(lambda t: t.update({EXPERT: t[EXPERT][:-1].clone()})), [EXPERT, "[47, 32]", "[48, 32]"]),
    "unknown tensor of an expert": (
        tensors(lambda t: t.update({EXPERT.replace("weight", "bias"): torch.zeros(48)})),
        ["w3.bias", "does not know"],
    ),
    "unknown tensor of the block": (
        tensors(lambda t: t.update({"model.layers.0.block_sparse_moe.shared.weight": torch.zeros(2)})),
        ["shared.weight", "does not know"],
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_bad_checkpoint(refused, run_cli, tiny_mixtral, calibration, tmp_path, kind):
    damage, words = CHECKPOINTS[kind]
    source = damage(tiny_mixtral, tmp_path / "bad")
    message = refused(3, "compress", source, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *calibration)
    assert all(word in message for word in words), message
    assert (
        refused(3, "compress", source, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, "--dry-run", *calibration)
        == message
    )
    for command in ("inspect", "verify"):
        told = refused(3, command, source, "--json")
        assert told == message if kind != "dense" else NO_FFN in told


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.weight", "model.norm.weight"]
)
def test_a_dense_model_that_lacks_a_tensor(refused, dense, calibration, tmp_path, name):
    source = change_tensors(copy_of(dense("llama"), tmp_path / "bad"), lambda tensors: tensors.pop(name))
    for command in ("inspect", "verify"):
        assert name in refused(3, command, source, "--json"), command
    assert name in refused(3, "tune", source, tmp_path / "out", "--data", calibration[1], "--dry-run")
    if "layers" in name:  # any other is the family's to have
        assert name in refused(3, "export", source, tmp_path / "out", "--format", "gguf")


@pytest.mark.parametrize(("start", "told"), [("", "save_pretrained"), ("language_model.model.", "rename it")])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_names_with_another_beginning(refused, run_cli, dense, tiny_mixtral, tmp_path, family, start, told):
    """transformers loads those without a beginning, dense ones are taken so, and of all others it is told."""
    source = copy_of(dense("llama") if family == "llama" else tiny_mixtral, tmp_path / "other")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            tensors[name.replace("model.", start, 1)] = tensors.pop(name)

    change_tensors(source, rename)
    if family == "llama" and not start:
        assert run_cli("inspect", source).code == 0
    else:
        message = refused(3, "inspect", source)
        assert all(word in message for word in ("has no tensor model.layers.0.", f"as {start}layers.0.", told)), message


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_a_model_that_lacks_a_tensor_outside_of_its_layers(refused, tiny_mixtral, tmp_path, name):
    """A job without a text would read it last, and a result that lacks it would be called moetool's defect."""
    source = change_tensors(copy_of(tiny_mixtral, tmp_path / "bad"), lambda tensors: tensors.pop(name))
    job = ("compress", source, tmp_path / "out", "--method", "quantize", "--bits", 4, "--sensitivity", "none")
    for words in (("inspect", source), ("verify", source), job, (*job, "--dry-run")):
        assert f"has no tensor {name}, which its config.json promises" in refused(3, *words), words


NO_PLACE = ("layers.1.self_attn.q_proj.bias", "layers.1.self_attn.q_norm.weight", "norm.bias", "lm_head.bias")


@pytest.mark.parametrize("name", NO_PLACE)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_tensor_that_the_model_has_no_place_for(refused, run_cli, dense, tiny_mixtral, tmp_path, family, name):
    """transformers would pass over it, and compute something else. It does so rightly with buffers of old files."""
    layer, name = "model.layers.1.self_attn", name if "lm_head" in name else f"model.{name}"
    source = copy_of(dense("llama") if family == "llama" else tiny_mixtral, tmp_path / "with")
    change_tensors(source, lambda tensors: tensors.update({f"{layer}.rotary_emb.inv_freq": torch.ones(4)}))
    exports = ["export", source, tmp_path / "out", "--format", "gguf", "--dry-run"]
    commands = (["inspect", source], ["verify", source], exports)
    for words in commands:
        assert run_cli(*words).code == 0, words
    change_tensors(source, lambda tensors: tensors.update({name: torch.zeros(4)}))
    for words in commands:
        assert f"a tensor {name}, and the model of its config.json has no place for it" in refused(3, *words), words


def test_a_tensor_beside_the_model_is_carried_along(run_cli, tiny_mixtral, calibration, tmp_path, monkeypatch):
    """As transformers passes over it: what makes a model and what runs it take it alike."""
    monkeypatch.chdir(tmp_path)
    beside = {"value_head.score.weight": torch.ones(4), "model.scale": torch.ones(1)}
    change_tensors(copy_of(tiny_mixtral, tmp_path / "model"), lambda tensors: tensors.update(beside))
    text = ("--sequence-length", 32, "--data", calibration[1])
    for words in (
        ("verify", "model"),
        ("compress", "model", "small", "--method", "d2moe", "--ratio", 0.3, *calibration),
        ("eval", "small", "--windows", 1, "--against", "model", *text),
        ("tune", "model", "tuned", "--steps", 1, *text),
    ):
        result = run_cli(*words)
        assert result.code == 0, result.stderr
    for made in ("small", "tuned"):
        kept = load_file(tmp_path / made / WEIGHTS)
        assert all(kept[name].equal(tensor) for name, tensor in beside.items()), made


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_bad_shard(refused, tiny_mixtral_sharded, calibration, tmp_path, damage):
    source = copy_of(tiny_mixtral_sharded, tmp_path / "bad")
    shard = sorted(source.glob("*.safetensors"))[1]
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-100])
    message = refused(3, "compress", source, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *calibration)
    assert shard.name in message
    assert damage in message


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.self_attn.o_proj.weight"])
def test_a_tensor_outside_the_experts(refused, run_cli, tiny_mixtral, calibration, tmp_path, name):
    source = copy_of(tiny_mixtral, tmp_path / "bad")
    change_tensors(source, lambda tensors: tensors.update({name: torch.ones(3)}))
    result = run_cli("compress", source, "--method", "d2moe", tmp_path / "misshapen", "--ratio", 0.3, *calibration)
    assert result.code == 3
    assert "shape [3]" in result.stderr
    assert not list(tmp_path.glob("misshapen/*.safetensors"))
    change_tensors(source, lambda tensors: tensors.pop(name))
    message = refused(3, "compress", source, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *calibration)
    assert name in message, "found before anything is computed"


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", [EXPERT, "model.layers.2.self_attn.o_proj.weight", "model.embed_tokens.weight"])
def test_codes_that_nothing_names(refused, tiny_mixtral, calibration, tmp_path, name, dtype):
    """As where somebody took `quantization_config` out of config.json: not the first expert alone is looked at."""
    source = copy_of(tiny_mixtral, tmp_path / "bad")
    change_tensors(source, lambda tensors: tensors.update({name: tensors[name].to(getattr(torch, dtype))}))
    for command in (
        ("compress", source, "--method", "hybrid", tmp_path / "out", "--ratio", 0.3, *calibration),
        ("export", source, tmp_path / "out", "--format", "gguf"),
        ("eval", source, "--data", calibration[1]),
        ("generate", source, "text"),
    ):
        told = refused(3, *command)
        assert f"{name} is stored as {dtype}, and config.json names no quantization" in told


@pytest.mark.parametrize("name", [EXPERT, "model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers(run_cli, tiny_mixtral, calibration, tmp_path, name, value):
    """Found when they are first used; nothing that could be taken for a result is left."""
    source = copy_of(tiny_mixtral, tmp_path / "bad")
    change_tensors(source, lambda tensors: tensors[name].view(-1)[::7].fill_(value))
    commands = {
        "compress": ("--ratio", 0.3, *calibration),
        "fisher-merge": calibration,
        "decompose": (),
    }
    if name != EXPERT:
        del commands["decompose"]
    for command, options in commands.items():
        result = run_cli(command, source, tmp_path / command, *options)
        assert result.code in (3, 5), (command, result.stderr)
        last = result.stderr.splitlines()[-1]
        assert last.startswith("error: ")
        assert "NaN" in last
        assert not {path.name for path in tmp_path.glob(f"{command}/*")} - {".moetool"}, command
        assert run_cli("inspect", tmp_path / command).code == 3


def test_numbers_whose_squares_overflow(run_cli, tiny_mixtral, dense, calibration, tmp_path):
    """They are finite, and so is what comes of them: the layer is named before its moments are used."""

    def scale(entering: str, leaving: str) -> Callable[[dict[str, Any]], None]:
        def change(tensors: dict[str, Any]) -> None:
            tensors[f"model.layers.1.{entering}.weight"] *= 1e21
            tensors[f"model.layers.1.{leaving}.weight"] *= 1e-21

        return change

    mixture = copy_of(tiny_mixtral, tmp_path / "mixture")
    llama = copy_of(dense("llama", hidden_size=64, intermediate_size=64), tmp_path / "llama")
    change_tensors(mixture, scale("block_sparse_moe.experts.0.w3", "block_sparse_moe.experts.0.w2"))
    change_tensors(llama, scale("mlp.up_proj", "mlp.down_proj"))
    for words, said in (
        (("compress", mixture, "--method", "quantize", "--bits", 4), r"Experts of layer 1 .* numbers up to \d.*e\+2"),
        (("compress", mixture, "--method", "d2moe", "--ratio", 0.3), r"Experts of layer 1 .* numbers up to \d.*e\+2"),
        (("export", llama, "--format", "gguf", "--type", "q4_0"), "Layer 1 gives mlp.down_proj numbers"),
    ):
        result = run_cli(*words[:2], tmp_path / "out", *words[2:], *calibration, "--overwrite")
        assert result.code == 3, result.stderr
        assert re.search(f"error: {said}.* fp32 cannot add up their squares", result.stderr), result.stderr


def test_gradients_whose_squares_overflow(run_cli, tiny_mixtral, calibration, tmp_path):
    """Weights are finite, and so is all that the model computes forwards."""
    source = copy_of(tiny_mixtral, tmp_path / "scaled")
    change_tensors(source, lambda tensors: tensors["lm_head.weight"].mul_(1e25))
    for method in ("auto", "hybrid", "d2moe", "quantize"):
        words = ("compress", source, tmp_path / "out", "--method", method, "--ratio", 0.3, "--overwrite")
        result = run_cli(*words, *calibration)
        assert result.code == 3, result.stderr
        assert re.search("error: Gradients of the loss at layer 2 reach .*e.2", result.stderr), result.stderr


def test_gradients_that_float16_is_too_narrow_for(run_cli, tiny_mixtral, calibration, tmp_path):
    """The same model is compressed in fp32: its weights are not to blame."""
    source = copy_of(tiny_mixtral, tmp_path / "scaled")
    change_tensors(source, lambda tensors: tensors["lm_head.weight"].mul_(1e4))
    words = ("compress", source, tmp_path / "out", "--method", "hybrid", "--ratio", 0.3, *calibration)
    result = run_cli(*words, "--compute-dtype", "float16")
    assert result.code == 3
    assert "Gradients of the loss" in result.stderr
    assert "try --compute-dtype float32" in result.stderr
    assert run_cli(*words, "--overwrite").code == 0


@pytest.mark.parametrize("command", [("decompose",), ("compress", "--method", "ders-quantize")])
def test_nan_is_found_without_a_text(run_cli, tiny_mixtral, tmp_path, command):
    source = copy_of(tiny_mixtral, tmp_path / "bad")
    change_tensors(source, lambda tensors: tensors[EXPERT].view(-1)[:3].fill_(torch.nan))
    result = run_cli(command[0], source, tmp_path / "out", *command[1:])
    assert result.code == 3
    assert "expert" in result.stderr
    assert "NaN" in result.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("out/*.safetensors"))


# -- tokenizer and text


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("tokenizer.json", "tokenizer_config.json"), ["No tokenizer in", "tokenizer.json"]),
        (written("tokenizer.json", b"{}"), ["tokenizer"]),
    ],
)
def test_a_bad_tokenizer(refused, tiny_mixtral, calibration, tmp_path, damage, words):
    source = damage(tiny_mixtral, tmp_path / "bad")
    for command in (
        ("compress", source, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3),
        ("fisher-merge", source, tmp_path / "out"),
    ):
        message = refused(3, *command, *calibration)
        assert all(word in message for word in words), message
    message = refused(3, "eval", source, "--data", calibration[1], "--sequence-length", 32)
    assert all(word in message for word in words), message


def test_a_tokenizer_that_more_libraries_read(refused, tiny_mixtral, calibration, tmp_path, monkeypatch):
    """transformers asks for tiktoken, whichever of both formats a file of that name has."""
    source = copy_of(tiny_mixtral, tmp_path / "pieces")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr("moetool.checkpoint.names.distributions", lambda name: [])
    job = ("compress", source, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *calibration, "--dry-run")
    told = "is one of SentencePiece (tokenizer.model), without tokenizer.json."
    read = ("eval", source, "--data", calibration[1])
    for command in (read, job):
        message = refused(3, *command)
        assert told in message
        assert "pip install sentencepiece protobuf. " in message
    (source / "tokenizer.model").write_bytes(b"IQ== 0\n")  # tiktoken's
    assert told not in refused(3, *read)


def test_the_tokenizer_of_another_model(refused, make_mixtral, save_model, calibration, tmp_path):
    source = save_model(make_mixtral(vocab_size=100), tmp_path / "small")
    message = refused(3, "compress", source, "--method", "d2moe", tmp_path / "out", "--ratio", 0.2, *calibration)
    assert "vocabulary ends at 99" in message


TEXTS: dict[str, tuple[bytes | None, str, list[str]]] = {
    "missing": (None, "text.txt", ["No such file", "text.txt"]),
    "empty": (b"", "text.txt", ["text.txt", "no text"]),
    "shorter than a window": (b"a b c", "text.txt", ["text.txt", "32"]),
    "not UTF-8": (b"\xff\xfe" * 1000, "text.txt", ["not UTF-8", "iconv"]),
    "of unknown kind": (b"text " * 1000, "text.doc", ["text.doc", ".txt, .jsonl, .parquet"]),
    "not JSON": (b"text " * 1000, "text.jsonl", ["text.jsonl"]),
    "without a text column": (b'{"words": "text"}\n' * 100, "text.jsonl", ["words", ":::COLUMN"]),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_bad_text(refused, tiny_mixtral, tmp_path, kind):
    data, name, words = TEXTS[kind]
    text = tmp_path / name
    if data is not None:
        text.write_bytes(data)
    options = ("--calibration", text, "--sequence-length", 32)
    message = refused(3, "compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *options)
    assert all(word in message for word in words), message
    assert refused(3, "fisher-merge", tiny_mixtral, tmp_path / "out", *options) == message
    message = refused(3, "eval", tiny_mixtral, "--data", text, "--sequence-length", 32)
    assert all(word in message for word in words), message


def test_a_mended_command_starts(refused, run_cli, tiny_mixtral, calibration, tmp_path):
    """A misspelt name costs nothing but the time to spell it right."""
    refused(
        3,
        "compress",
        tiny_mixtral,
        "--method",
        "d2moe",
        tmp_path / "out",
        "--ratio",
        0.3,
        "--calibration",
        "./nope.txt",
        *calibration[2:],
    )
    assert (
        run_cli("compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *calibration).code == 0
    )


def test_an_output_that_was_there_stays(refused, tiny_mixtral, tmp_path):
    (tmp_path / "out").mkdir()
    options = ("--calibration", "./nope.txt", "--sequence-length", 32)
    refused(3, "compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *options)
    assert (tmp_path / "out").is_dir()


# -- options

OPTIONS: dict[str, tuple[int, tuple[object, ...], list[str]]] = {
    "ratio too high": (2, ("--ratio", 0.9), ["--ratio 0.9", "at most 0.", "kB"]),
    "ratio above one": (2, ("--ratio", 40), ["--ratio 40", "write 0.4 or 40%"]),
    "ratio that is too much": (2, ("--ratio", 0.99), ["--ratio 0.99", "at most 0."]),
    "ratio of nothing": (2, ("--ratio", 0), ["--ratio 0", "above 0"]),
    "negative ratio": (2, ("--ratio", -0.1), ["--ratio -0.1", "above 0"]),
    "ratio that is no number": (2, ("--ratio", "nan"), ["--ratio nan"]),
    "ratio and rank": (2, ("--ratio", 0.3, "--rank", 4), ["--ratio", "--rank", "one of them"]),
    "neither ratio nor rank": (2, (), ["--ratio", "--rank"]),
    "negative rank": (2, ("--rank", -1), ["--rank", "-1"]),
    "more than the context": (2, ("--ratio", 0.3, "--sequence-length", 129), ["129", "context of 128"]),
    "windows of one token": (2, ("--ratio", 0.3, "--sequence-length", 1), ["--sequence-length", "1"]),
    "no samples": (2, ("--ratio", 0.3, "--samples", 0), ["--samples"]),
    "too little disk": (4, ("--ratio", 0.3, "--disk", "1KB"), ["disk", "1.0 kB"]),
    "too little memory": (4, ("--ratio", 0.3, "--memory", "1MB"), ["memory", "1.0 MB", "Python", "--memory"]),
    "no size": (2, ("--ratio", 0.3, "--memory", "plenty"), ["--memory", "plenty", "8GiB"]),
    "no shard size": (2, ("--ratio", 0.3, "--shard-size", "5 loaves"), ["--shard-size", "loaves", "8GiB"]),
    "unknown method": (2, ("--ratio", 0.3, "--method", "magic"), ["magic", "d2moe"]),
    "unknown option": (2, ("--ratio", 0.3, "--ration", 0.3), ["--ration"]),
    "unknown choice": (2, ("--ratio", 0.3, "--svd", "best"), ["--svd", "best", "truncation-aware"]),
    "not a number": (2, ("--ratio", "much"), ["--ratio much", "0.4 or 40%"]),
    "unknown device": (2, ("--ratio", 0.3, "--device", "toaster"), ["toaster"]),
    "a device for shapes only": (2, ("--ratio", 0.3, "--device", "meta"), ["meta"]),
    "no such seed": (2, ("--ratio", 0.3, "--seed", 2**64), ["--seed"]),
    "negative seed": (2, ("--ratio", 0.3, "--seed", -1), ["--seed"]),
    "absent device": (2, ("--ratio", 0.3, "--device", "cuda:99"), ["cuda:99"]),
    "pruning everything": (2, ("--ratio", 0.3, "--prune-base", 1), ["--prune-base"]),
    "resume and overwrite": (2, ("--ratio", 0.3, "--resume", "--overwrite"), ["one of them"]),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_bad_option(refused, tiny_mixtral, calibration, tmp_path, kind):
    code, options, words = OPTIONS[kind]
    message = refused(code, "compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", *calibration, *options)
    assert all(word in message for word in words), message


def test_the_possible_range_is_possible(run_cli, refused, tiny_mixtral_bf16, calibration, tmp_path):
    """The number that the message gives works, and the next one does not."""
    arguments = ("compress", tiny_mixtral_bf16, "--method", "d2moe", tmp_path / "out", *calibration, "--ratio")
    highest = float(refused(2, *arguments, 0.99).rpartition("at most ")[2].rstrip("."))
    refused(2, *arguments, highest + 0.001)
    result = run_cli(*arguments, highest, "--json")
    assert result.code == 0, result.stderr
    assert result.json["achieved_ratio"] >= highest


def test_missing_arguments(refused, tiny_mixtral, tmp_path):
    assert "output" in refused(2, "compress", tiny_mixtral, "--method", "d2moe").lower()
    assert "extra" in refused(2, "inspect", tiny_mixtral, tiny_mixtral).lower()


# -- the output


def test_an_output_that_is_not_empty(refused, tiny_mixtral, calibration, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.tex").write_text("years of work")
    arguments = ("compress", tiny_mixtral, "--method", "d2moe", output, "--ratio", 0.3, *calibration)
    assert "not empty" in refused(2, *arguments)
    assert "not written by moetool" in refused(2, *arguments, "--overwrite")
    assert "no unfinished run" in refused(2, *arguments, "--resume")
    assert (output / "thesis.tex").read_text() == "years of work"


def test_overwrite_keeps_what_it_cannot_replace(refused, run_cli, tiny_mixtral, calibration, tmp_path):
    """A mistake in a second command does not cost the result of the first."""
    assert run_cli("decompose", tiny_mixtral, tmp_path / "out").code == 0
    arguments = ("compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", "--overwrite")
    refused(2, *arguments, "--ratio", 0.99, *calibration)
    refused(2, *arguments, "--ratio", 0.3, *calibration, "--sequence-length", 129)
    refused(3, *arguments, "--ratio", 0.3, *calibration, "--calibration", "./nope.txt")
    refused(4, *arguments, "--ratio", 0.3, *calibration, "--disk", "1kB")


def test_an_output_that_is_a_file(refused, tiny_mixtral, calibration, tmp_path):
    (tmp_path / "out").write_text("not a directory")
    for option in ((), ("--overwrite",), ("--resume",)):
        message = refused(
            2, "compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *calibration, *option
        )
        assert "not a directory" in message


def test_an_output_that_cannot_be_made(refused, tiny_mixtral, calibration, tmp_path):
    (tmp_path / "file").write_text("")
    message = refused(
        2, "compress", tiny_mixtral, "--method", "d2moe", tmp_path / "file" / "out", "--ratio", 0.3, *calibration
    )
    assert str(tmp_path / "file" / "out") in message


@pytest.mark.parametrize("place", ["source", "source/inside", ".", "link"])
@pytest.mark.parametrize("option", [(), ("--overwrite",), ("--resume",)])
def test_an_output_that_is_the_input_or_holds_it(refused, decomposed, calibration, tmp_path, place, option):
    """Not even with --overwrite, and not even if all of it was written by moetool."""
    source = copy_of(decomposed, tmp_path / "source")
    shutil.copy(source / "moetool.json", tmp_path)
    (tmp_path / "link").symlink_to(source)
    message = refused(2, "svd-compress", source, tmp_path / place, "--ratio", 0.3, *calibration, *option)
    assert "is the input" in message


# -- presets


@pytest.fixture
def preset(tmp_path, calibration) -> Callable[..., Path]:
    """`preset(**entries)` writes a preset for `compress`, with those entries for its own."""

    def write(**entries: Any) -> Path:
        options = {"calibration": str(calibration[1]), "mix": 0, "samples": 16, "sequence_length": 32, "ratio": 0.3}
        whole = {"command": "compress", "method": "d2moe", "options": options, **entries}
        path = tmp_path / "preset.yaml"
        path.write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))  # JSON is YAML
        return path

    return write


PRESETS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "unknown option": (2, {"options": {"ratoi": 0.3}}, ["ratoi", "ratio"]),
    "bad value": (2, {"options": {"ratio": "much"}}, ["--ratio much"]),
    "of another command": (3, {"command": "export"}, ["moetool export", "compress"]),
    "of another method": (2, {"method": "magic"}, ["--method magic"]),
    "of no command": (3, {"command": None}, ["`command: compress`"]),
    "no options": (3, {"options": None}, ["options"]),
    "unknown entry": (3, {"optoins": {}}, ["optoins"]),
    "variants that are none": (3, {"variants": ["a"]}, ["variants"]),
    "variant that is none": (3, {"variants": {"a": None}}, ["variants"]),
}


@pytest.mark.parametrize("kind", PRESETS)
def test_a_bad_preset(refused, preset, tiny_mixtral, tmp_path, kind):
    code, entries, words = PRESETS[kind]
    message = refused(code, "compress", tiny_mixtral, tmp_path / "out", "--preset", preset(**entries))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "word"),
    [(None, "No such file"), ("[", "preset.yaml"), ("just words", "preset.yaml"), ("", "preset.yaml")],
)
def test_a_preset_that_is_none(refused, tiny_mixtral, tmp_path, text, word):
    path = tmp_path / "preset.yaml"
    if text is not None:
        path.write_text(text)
    assert word in refused(3, "compress", tiny_mixtral, tmp_path / "out", "--preset", path)


def test_an_unknown_variant(refused, preset, tiny_mixtral, tmp_path):
    path = preset(variants={"small": {"ratio": 0.4}, "large": {"ratio": 0.2}})
    message = refused(3, "compress", tiny_mixtral, tmp_path / "out", "--preset", f"{path}:medium")
    assert "medium" in message
    assert "small, large" in message


def test_a_demo_where_a_file_is(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    result = run_cli("demo", tmp_path / "notes")
    assert result.code == 2
    assert "not a directory" in result.stderr


@pytest.mark.parametrize("command", ["compress", "eval", "bench"])
def test_attention_that_transformers_cannot_run_is_refused(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is built without a word, and fails when it runs."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("`windowed` was called without a window.")

    monkeypatch.setattr(MixtralAttention, "forward", refuse)
    source = copy_of(tiny_mixtral, tmp_path / "source")
    arguments = {
        "compress": (
            tmp_path / "out",
            "--ratio",
            0.4,
            "--calibration",
            tiny_text,
            "--samples",
            2,
            "--sequence-length",
            32,
        ),
        "eval": ("--data", tiny_text, "--sequence-length", 32),
        "bench": ("--lengths", 4, "--new-tokens", 1, "--rounds", 1),
    }
    result = run_cli(command, source, *arguments[command])
    assert result.code == 3, result.stderr
    assert "source/config.json describes, or cannot run it: `windowed` was called" in result.stderr


def test_a_base_is_told_to_be_one(run_cli: Any, base: Path) -> None:
    result = run_cli("inspect", base)
    assert result.code == 3
    assert f"moetool decompose MODEL OUTPUT --base {base}" in result.stderr
