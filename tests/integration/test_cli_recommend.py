"""`moetool recommend`: what it says fits, and what it says to type can be typed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 32000, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    """The config of Mixtral-8x7B alone."""
    path = tmp_path / "mixtral"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MIXTRAL))
    return path


@pytest.mark.parametrize(("memory", "effort"), [("16GB", ("--effort", "best")), ("32GB", ())])
def test_what_it_says_is_a_command_that_fits(run_cli: Any, mixtral: Path, memory: str, effort: tuple[str, ...]) -> None:
    told = run_cli("recommend", mixtral, "--memory", memory, "--json").json
    room = int(memory.removesuffix("GB")) * 9 * 10**8
    assert (told["parameters"], told["weights"]) == (46_702_792_704, room)
    assert told["ratio"] == pytest.approx(1 - room / told["bytes"], abs=1e-6)
    assert told["bits"] == pytest.approx(8 * room / 46_702_792_704)
    command = told["commands"][0]
    assert tuple(command[5:]) == effort
    assert told["commands"][1] == ["eval", command[2], "--data", "held-out.txt", "--against", str(mixtral)]
    plan = run_cli(*command, "--dry-run", "--json").json
    assert 0.99 * room < plan["output_bytes"] <= room
    assert plan["peak_memory_bytes"] == told["peak_memory_bytes"]


def test_a_job_that_needs_more_than_the_memory_is_told_of_it(run_cli: Any, mixtral: Path) -> None:
    """With fewer experts at a time; where that is too much, too, with another way that fits, or without one."""
    told = run_cli("recommend", mixtral, "--memory", "19GB", "--json").json
    assert told["commands"][0][-2:] == ["--memory", "19GB"]
    assert told["peak_memory_bytes"] <= 19 * 10**9
    note = run_cli("recommend", mixtral, "--memory", "16GB", "--json").json["notes"][0]
    way = "--size 14.4GB --effort fast --memory 16GB"
    assert re.fullmatch(rf"This job needs at least .* more than 16\.0 GB; with {way} it needs .*", note)
    plan = run_cli("compress", mixtral, "x", *way.split(), "--dry-run", "--json").json
    assert plan["peak_memory_bytes"] <= 16 * 10**9
    note = run_cli("recommend", mixtral, "--memory", "7GB", "--json").json["notes"][0]
    assert note.endswith("more than 7.0 GB: make the model on a larger machine.")


def test_llama_cpp_is_an_alternative_where_it_runs_such_a_model(run_cli: Any, mixtral: Path) -> None:
    told = run_cli("recommend", mixtral, "--memory", "24GB", "--json").json
    other = run_cli("recommend", mixtral, "--memory", "24GB", "--engine", "llama.cpp", "--json").json
    assert told["in_llama_cpp"] == other["commands"][0]
    assert "in_llama_cpp" not in other
    assert "in_llama_cpp" not in run_cli("recommend", mixtral, "--memory", "8GB", "--json").json


def test_in_words(run_cli: Any, mixtral: Path) -> None:
    said = run_cli("recommend", mixtral, "--memory", "32GB")
    assert "32.0 GB, of which 28.8 GB are for weights" in said.stdout
    assert f"compress {mixtral} mixtral-small --size 28.8GB" in said.stdout
    assert "4.9 per parameter: these bytes divided by all parameters" in said.stdout
    assert "mixtral-gguf --format gguf --size 28.8GB" in said.stdout
    assert said.stderr.endswith("--size 28.8GB --dry-run\n")


def test_what_fits_is_left_as_it_is(run_cli: Any, mixtral: Path) -> None:
    said = run_cli("recommend", mixtral, "--memory", "110GB")
    assert "as it is" in said.stdout
    assert "generate" in said.stderr
    assert "commands" not in run_cli("recommend", mixtral, "--memory", "110GB", "--json").json


def test_for_llama_cpp(run_cli: Any, mixtral: Path) -> None:
    told = run_cli("recommend", mixtral, "--memory", "24GB", "--engine", "llama.cpp", "--json").json
    assert told["commands"][0][3:] == ["--format", "gguf", "--size", "21.6GB"]
    assert "made 79% smaller has a KL divergence of 2.1 to 4.24" in told["notes"][0]
    plan = run_cli(*told["commands"][0], "--dry-run", "--json").json
    assert 0.99 * told["weights"] < plan["output_bytes"] <= told["weights"]
    assert plan["peak_memory_bytes"] == told["peak_memory_bytes"]


def test_too_little_for_llama_cpp(run_cli: Any, mixtral: Path) -> None:
    result = run_cli("recommend", mixtral, "--memory", "8GB", "--engine", "llama.cpp")
    assert result.code == 2
    assert "--memory 8.0 GB leaves 7.0 GB for weights" in result.stderr
    assert "in llama.cpp's types this model takes from" in result.stderr


@pytest.mark.parametrize(
    ("memory", "says"),
    [("1GB", "leaves nothing for weights"), ("3GB", "With fewer experts"), ("much", "is not a size")],
)
def test_what_cannot_be(run_cli: Any, mixtral: Path, memory: str, says: str) -> None:
    result = run_cli("recommend", mixtral, "--memory", memory)
    assert result.code == 2
    assert says in result.stderr


def test_a_dense_model(run_cli: Any, dense: Any) -> None:
    result = run_cli("recommend", dense("llama"))
    assert result.code == 3
    assert "is not an MoE model" in result.stderr
