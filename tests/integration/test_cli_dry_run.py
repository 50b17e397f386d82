"""`--dry-run`: what a job will cost, from file headers alone."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from checkpoints import weight_bytes
from sampling import sampled

from moetool.job.journal import Journal


def whole_mixtral(directory: Path) -> int:
    """Mixtral-8x7B as headers over a hole: 93 GB of bf16 that take no room. Returns the file's size."""
    hidden, intermediate, layers, vocabulary = 4096, 14336, 32, 32000
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
    }
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "lm_head.weight": [vocabulary, hidden]}
    shapes["model.norm.weight"] = [hidden]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": [hidden] for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": [hidden, hidden] for name in "qo"}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": [1024, hidden] for name in "kv"}
        shapes[f"{prefix}block_sparse_moe.gate.weight"] = [8, hidden]
        for expert in range(8):
            experts = f"{prefix}block_sparse_moe.experts.{expert}"
            shapes |= {f"{experts}.{name}.weight": [intermediate, hidden] for name in ("w1", "w3")}
            shapes[f"{experts}.w2.weight"] = [hidden, intermediate]
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header).encode()
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.model").touch()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + position)
        return 8 + len(encoded) + position


def test_dry_run_of_the_real_size_reads_headers_only(run_cli, tmp_path):
    size = whole_mixtral(tmp_path / "mixtral")
    assert 93e9 < size < 94e9
    assert (tmp_path / "mixtral" / "model.safetensors").stat().st_blocks * 512 < 1e6
    text = tmp_path / "wiki.txt"
    text.write_text("Words. " * 100)
    arguments = (
        "compress",
        tmp_path / "mixtral",
        "--method",
        "d2moe",
        tmp_path / "out",
        "--ratio",
        0.4,
        "--calibration",
        text,
    )
    arguments += ("--memory", "64GB")
    result = run_cli(*arguments, "--dry-run", "--json")
    assert result.code == 0, result.stderr
    told = result.json
    assert told["input_bytes"] == told["original_bytes"] == size
    assert told["output_bytes"] == pytest.approx(0.6 * size, rel=0.005)
    assert told["disk_bytes"] == told["output_bytes"] + told["scratch_bytes"]
    layer = 4 * (8 * 3 * 4096 * 14336 + 2 * 4096 * 4096 + 2 * 1024 * 4096)
    activations = told["calibration_tokens"] * 4096 * 4
    assert layer < told["peak_memory_bytes"] < 4 * layer + activations
    assert (told["layers"], told["moe_layers"], told["experts"]) == (32, 32, 8)
    assert {path.name for path in tmp_path.iterdir()} == {"mixtral", "wiki.txt"}, "nothing was written"

    for_people = run_cli(*arguments, "--dry-run")
    for line in (r"^input +93\.4 GB", r"^output +56\.0 GB", r"^disk in all +[\d.]+ [GT]B", r"^peak memory +[\d.]+ GB"):
        assert re.search(line, for_people.stdout, re.M), for_people.stdout
    assert "Nothing was written" in for_people.stdout

    impossible = run_cli(*arguments[:6], 0.9, "--calibration", text, "--dry-run")
    assert impossible.code == 2
    assert re.search(r"at most 0\.8\d", impossible.stderr)


SMALLEST = r"--size must be at least ([\d.]+ kB)|takes from ([\d.]+ kB)"
LARGEST = r"--ratio must be above 0 and at most (0\.\d+)\."


@pytest.mark.parametrize("method", ["auto", "hybrid", "quantize", "d2moe", "reap", "gguf"])
def test_the_smallest_size_that_an_error_tells_is_possible(run_cli, tiny_mixtral, calibration, tmp_path, method):
    job = ("compress", tiny_mixtral, tmp_path / "out", "--method", method, *calibration, "--dry-run")
    if method == "gguf":
        job = ("export", tiny_mixtral, tmp_path / "out", "--format", method, *calibration, "--dry-run")
    for option, impossible, pattern in (("--size", "1B", SMALLEST), ("--ratio", 0.999, LARGEST)):
        if option == "--ratio" and method == "gguf":
            continue
        told = run_cli(*job, option, impossible).stderr
        assert ("ratio" in told) == (option == "--ratio"), "in the unit that was asked in"
        found = re.search(pattern, told)
        assert found, told
        result = run_cli(*job, option, next(filter(None, found.groups())))
        assert result.code == 0, result.stderr


def test_dry_run_tells_the_time(run_cli, tiny_mixtral_bf16, calibration, tmp_path):
    arguments = (
        "compress",
        tiny_mixtral_bf16,
        "--method",
        "d2moe",
        tmp_path / "out",
        *calibration,
        "--ratio",
        0.3,
        "--dry-run",
    )
    told = run_cli(*arguments, "--json").json
    assert [phase["name"] for phase in told["phases"]] == ["Forward", "Backward", "Encode and write"]
    assert sum(phase["seconds"] for phase in told["phases"]) == pytest.approx(told["seconds"])
    assert told["seconds"] > 0
    assert re.search(r"^time +about \d+ s( \(.*\))?$", run_cli(*arguments).stdout, re.M)  # tests/cli/test_shown_plan.py


def test_dry_run_where_nothing_can_be_measured(run_cli, tiny_mixtral_bf16, tmp_path, monkeypatch):
    def refuse(device, output):
        raise OSError("Permission denied")

    monkeypatch.setattr("moetool.job.estimate.this_machine", refuse)
    arguments = ("decompose", tiny_mixtral_bf16, tmp_path / "out", "--dry-run")
    assert run_cli(*arguments, "--json").json["seconds"] is None
    for_people = run_cli(*arguments).stdout
    assert re.search(r"^time +unknown: this machine cannot be measured \(Permission denied\)", for_people, re.M)


@pytest.mark.parametrize(
    "command",
    sampled(
        ("fisher-merge", "decompose", "svd-compress", "prune-base", "export", "compress"),
        ("decompose", "svd-compress", "export", "compress"),
    ),
)
def test_dry_run_says_what_the_run_then_takes(
    run_cli, tiny_mixtral_bf16, calibration, base, tiny_mixtral, decomposed, small, tmp_path, command
):
    source, options = {
        "fisher-merge": (tiny_mixtral_bf16, calibration),
        "decompose": (tiny_mixtral, ("--base", base)),
        "svd-compress": (decomposed, (*calibration, "--ratio", 0.3)),
        "prune-base": (decomposed, ()),
        "export": (small, ()),
        "compress": (tiny_mixtral_bf16, ("--method", "d2moe", *calibration, "--ratio", 0.3, "--prune-base", 0.25)),
    }[command]
    dry = run_cli(command, source, tmp_path / "out", *options, "--dry-run", "--json")
    assert dry.code == 0, dry.stderr
    assert not (tmp_path / "out").exists()
    wet = run_cli(command, source, tmp_path / "out", *options, "--json")
    assert wet.code == 0, wet.stderr
    assert dry.json["input_bytes"] == weight_bytes(source)
    if command != "fisher-merge":  # whose statistics are not small beside so small a base
        assert weight_bytes(tmp_path / "out") <= dry.json["output_bytes"]
    if command in ("decompose", "prune-base", "export"):
        assert wet.json["bytes_after"] == dry.json["output_bytes"]


def begun(output: Path, fingerprint: str) -> Path:
    journal = Journal(output / ".moetool" / "journal.jsonl", fingerprint)
    journal.path.parent.mkdir(parents=True)
    journal.done("text")
    return output


def of_moetool(output: Path) -> Path:
    output.mkdir()
    (output / "moetool.json").write_text("{}")
    return output


def of_others(output: Path) -> Path:
    output.mkdir()
    (output / "thesis.tex").write_text("Years of work.")
    return output


def records(file: Path) -> Path:
    file.write_text('{"words": "a b c"}\n' * 9)
    return file


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}


def parquet(file: Path) -> Path:
    table = pyarrow.table({"words": ["a b c"] * 9})
    pyarrow.parquet.write_table(table, file)
    return file


# What is wrong: how it is made in a directory, with what is added to a command; exit code, what is said.
REFUSED = {
    "both": (lambda here: (here / "out", "--resume", "--overwrite"), 2, "give one of them"),
    "of others": (lambda here: (of_others(here / "out"),), 2, "was not written by moetool (no moetool.json)"),
    "not to be overwritten": (lambda here: (of_others(here / "out"), "--overwrite"), 2, "not deleting it"),
    "of moetool": (lambda here: (of_moetool(here / "out"),), 2, "--overwrite deletes what is there"),
    "begun": (lambda here: (begun(here / "out", "?"),), 2, "unfinished run: --resume goes on with it"),
    "other settings": (lambda here: (begun(here / "out", "?"), "--resume"), 2, "started with other settings"),
    "nothing to resume": (lambda here: (of_others(here / "out"), "--resume"), 2, "there is nothing to resume"),
    "a file": (lambda here: (records(here / "out"),), 2, "exists and is not a directory"),
    "unwritable": (lambda here: ("/proc/1/nothing/out",), 4, "Cannot write /proc/1/nothing/out"),
    "column": (
        lambda here: (here / "out", "--calibration", f"{records(here / 'a.jsonl')}:::text"),
        3,
        "it has 'words'",
    ),
    "no column": (lambda here: (here / "out", "--calibration", parquet(here / "a.parquet")), 3, "it has 'words'"),
    "no text": (lambda here: (here / "out", "--calibration", here / "no.txt"), 3, "No such file or folder"),
    "no folder of texts": (
        lambda here: (here / "out", "--calibration", folder(here / "a")),
        3,
        "has no .txt, .jsonl, .parquet files",
    ),
    "no name of the hub": (lambda here: (here / "out", "--calibration", "wiki text:raw"), 3, "'wiki text' is neither"),
    "the text's place": (lambda here: (here / "t", "--calibration", records(here / "t")), 2, "which this job reads"),
    "memory": (lambda here: (here / "out", "--memory", "1MB"), 4, "of memory and has 1.0 MB"),
    "disk": (lambda here: (here / "out", "--disk", "1kB"), 4, "and has 1.0 kB"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_dry_run_refuses_what_the_job_does(run_cli, tiny_mixtral_bf16, calibration, tmp_path, wrong):
    """In the same words, and neither leaves a trace."""
    make, code, says = REFUSED[wrong]
    output, *more = make(tmp_path)
    there = files(tmp_path)
    said = []
    for dry in (("--dry-run",), ()):
        options = ("--ratio", 0.3, *calibration, *more, *dry)
        result = run_cli("compress", tiny_mixtral_bf16, "--method", "d2moe", output, *options)
        assert result.code == code, (dry, result.stderr)
        assert says in result.stderr, (dry, result.stderr)
        said.append(result.stderr)
        assert files(tmp_path) == there
    assert said[0] == said[1]


def test_more_than_is_free_is_said_beside_the_plan(run_cli, tiny_mixtral_bf16, calibration, tmp_path, monkeypatch):
    """The plan may be for another machine, or another hour."""
    monkeypatch.setattr("moetool.job.plan.free_bytes", lambda: 10**8)
    arguments = ("compress", tiny_mixtral_bf16, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *calibration)
    dry = run_cli(*arguments, "--dry-run")
    assert (dry.code, "Nothing was written" in dry.stdout) == (0, True)
    assert "note: it would be refused here and now. This job needs about" in dry.stderr
    assert "has 100.0 MB. With --memory, say of what is free, it works on fewer experts at a time." in dry.stderr
    assert run_cli(*arguments).code == 4


def test_where_fewer_windows_would_not_help_the_least_is_explained(run_cli, tiny_mixtral_bf16, calibration, tmp_path):
    arguments = ("compress", tiny_mixtral_bf16, tmp_path / "out", "--ratio", 0.3, *calibration, "--memory", "100MB")
    for more in ((), ("--samples", 1)):
        refused = run_cli(*arguments, *more, "--dry-run")
        assert refused.code == 4
        assert "the least it works with: 0.4 GB for Python" in refused.stderr
        assert "Fewer" not in refused.stderr


def test_a_name_that_the_hub_cannot_have_is_not_uploaded_to(run_cli, tiny_mixtral):
    for dry in (("--dry-run",), ()):
        result = run_cli("push", tiny_mixtral, "me/a b", *dry)
        assert result.code == 2
        assert "'me/a b' cannot be a repository" in result.stderr


def test_a_published_model_in_four_bits_from_its_config_alone(run_cli: Any, tmp_path: Path) -> None:
    # gpt-oss-120b, of 116.83 billion parameters: transformers' defaults are its sizes.
    config = {"model_type": "gpt_oss", "dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = ("compress", tmp_path, tmp_path / "out", "--method", "quantize", "--calibration", "none", "--bits", 2)
    plan = run_cli(*job, "--dry-run", "--json").json
    experts = 36 * 128 * 3 * 2880**2
    assert plan["decoded_bytes"] == pytest.approx(2 * 116.83e9, rel=1e-3)
    assert plan["input_bytes"] == pytest.approx(plan["decoded_bytes"] - experts * (2 - 4.25 / 8), rel=1e-3)
    beside = plan["decoded_bytes"] - 2 * experts
    assert experts * 2 / 8 + beside < plan["output_bytes"] < experts * 2.3 / 8 + beside
    assert "note" not in plan  # it is smaller


@pytest.mark.parametrize("command", [("compress", "--ratio", 0.5), ("tune",)])
def test_a_text_needs_words_and_a_tokenizer(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, command: tuple[object, ...]
) -> None:
    """Both are seen before the run, which would end at them after its plan was called good."""
    name, *options = command
    option = "--data" if name == "tune" else "--calibration"
    empty, wordless = tmp_path / "empty.txt", shutil.copytree(tiny_mixtral, tmp_path / "wordless")
    empty.touch()
    for file in wordless.glob("tokenizer*"):
        file.unlink()
    for source, text, said in (
        (tiny_mixtral, empty, "empty.txt has no text"),
        (wordless, tiny_text, "No tokenizer in"),
    ):
        result = run_cli(name, source, tmp_path / "out", *options, option, text, "--dry-run")
        assert result.code == 3, result.stdout
        assert said in result.stderr


def test_more_windows_than_a_text_can_have_cost_nothing(run_cli: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("word " * 800)
    job = ("compress", tiny_mixtral, tmp_path / "out", "--method", "d2moe", "--ratio", 0.3, "--calibration", text)
    shape = ("--sequence-length", 16, "--mix", 0, "--dry-run", "--json")
    most = text.stat().st_size // 16
    few, all_there, more = (run_cli(*job, *shape, "--samples", count).json for count in (most // 2, most, 10**9))
    sizes = ("scratch_bytes", "disk_bytes", "peak_memory_bytes")
    assert [more[name] for name in sizes] == [all_there[name] for name in sizes]
    assert more["scratch_bytes"] > few["scratch_bytes"]
    assert f"The texts have {most} windows at most" in more["note"]
    assert "at most" not in all_there["note"]
