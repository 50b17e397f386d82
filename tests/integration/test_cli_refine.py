"""Hybrids whose codes and scales are refined, through the command line."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import logits

OPTIONS = ("--method", "hybrid", "--ratio", 0.5, "--group-size", 16)
TEXT = ("--samples", 32, "--sequence-length", 32)
SHARDS = ("--shard-size", "40kB")


@pytest.fixture(scope="module")
def arguments(tiny_mixtral_bf16, tiny_text) -> tuple[object, ...]:
    text = ("--calibration", tiny_text, "--mix", 0, *TEXT)
    return "compress", tiny_mixtral_bf16, *OPTIONS, *text, "--refine", 30, *SHARDS


@pytest.fixture(scope="module")
def refined(run_cli, arguments, tmp_path_factory) -> tuple[Path, Any]:
    """What that job writes, and what it told."""
    command, source, *options = arguments
    output = tmp_path_factory.mktemp("refined") / "model"
    result = run_cli(command, source, output, *options, "--json")
    assert result.code == 0, result.stderr
    return output, result.json


def test_better_than_without(run_cli, arguments, refined, tiny_mixtral_bf16, tiny_tokens, tmp_path) -> None:
    """In the same budget; and what it says of itself holds."""
    command, source, *options = arguments
    output, told = refined
    plain = tmp_path / "plain"
    result = run_cli(command, source, plain, *options, "--refine", 0, "--json")
    assert result.code == 0, result.stderr
    for own in (result.json, told):
        assert 0.49 * own["bytes_before"] < own["bytes_after"] <= 0.5 * own["bytes_before"]
    assert result.json["bytes_after"] == pytest.approx(told["bytes_after"], rel=0.01)
    tokens = tiny_tokens[2000:2256].view(4, 64)
    expected = logits(tiny_mixtral_bf16, tokens)
    with_it, without = ((logits(path, tokens) - expected).norm() for path in (output, plain))
    assert with_it < without
    for layer in told["layers"].values():
        own = layer["refined"]
        assert own["experts"] + own["kept"] == 4
        assert own["after"] < own["before"] or not own["experts"]
    assert any(layer["refined"]["experts"] for layer in told["layers"].values())
    assert "refined" not in result.json["layers"]["0"]
    assert run_cli("verify", output).code == 0


@pytest.mark.exhaustive
def test_killed_and_continued(crash, arguments, refined, tmp_path) -> None:
    crash.goes_on(tmp_path / "out", arguments, 75, refined[0])


@pytest.mark.exhaustive
def test_two_processes(crash, arguments, refined, tiny_mixtral_bf16, tiny_tokens, tmp_path) -> None:
    """Sums in another order flip other codes: not the same bytes, but as good."""
    output = tmp_path / "out"
    assert crash(output, arguments, ranks=2)["codes"] == [0, 0]
    tokens = tiny_tokens[2000:2256].view(4, 64)
    expected = logits(tiny_mixtral_bf16, tokens)
    errors = [float((logits(path, tokens) - expected).norm()) for path in (output, refined[0])]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)


def test_says_what_it_takes(run_cli, arguments, tmp_path) -> None:
    command, source, *options = arguments
    plans = [run_cli(command, source, tmp_path / "no", *options, *more, "--dry-run", "--json").json
             for more in ((), ("--refine", 0))]  # fmt: skip
    assert plans[0]["peak_memory_bytes"] > plans[1]["peak_memory_bytes"]
    assert plans[0]["scratch_bytes"] >= plans[1]["scratch_bytes"]
    assert plans[0]["output_bytes"] == plans[1]["output_bytes"]
