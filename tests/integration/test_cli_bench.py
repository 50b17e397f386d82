"""`moetool bench` as it is typed: tables, pictures, and what it refuses; docs/bench.md runs it with `--against`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunCli = Callable[..., Any]
QUICK = "--batch", "1,2", "--lengths", "8", "--new-tokens", 2, "--rounds", 1


def test_tables_and_a_picture(run_cli: RunCli, small: Path, tmp_path: Path) -> None:
    result = run_cli("bench", small, *QUICK, "--threads", 1, "--plot", tmp_path / "bench.svg")
    assert result.code == 0, result.stderr
    assert f"{small} (float32)" in result.stdout
    assert "1 thread\n" in result.stdout
    assert re.search(r"weight files +│ +[\d.]+ kB │", result.stdout)
    assert re.search(r"^copying +[\d.]+ [MG]B of memory per second, read and written$", result.stdout, re.MULTILINE)
    measured = r" +model │ +[\d,.]+ │ +[\d,.]+ │ +[\d,.]+ │ +[\d.]+ [kM] │ +[\d.]+ k │ +[\d.]+ kB │"
    assert re.search(rf"│ 1 +│ +8 │{measured} +\d+% │", result.stdout)
    assert re.search(rf"│ 2 +│ +8 │{measured} +│", result.stdout)
    assert "ratio" not in result.stdout
    assert (tmp_path / "bench.svg").stat().st_size > 1000


def test_without_new_tokens_there_is_no_speed_of_them(run_cli: RunCli, dense: Callable[..., Path]) -> None:
    encoder = dense("bert")
    refused = run_cli("bench", encoder, *QUICK)
    assert refused.code == 2
    assert "is an encoder (bert): it generates nothing" in refused.stderr
    told = run_cli("bench", encoder, *QUICK, "--new-tokens", 0, "--json").json["model"]
    assert {"decode_seconds", "flops_per_token"}.isdisjoint(told["cases"][0])
    assert told["cases"][0]["prefill_tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--lengths", "120,9", "--new-tokens", 9), 2, "120 tokens and 9 new ones are more than the 128 positions of"),
        (("--batch", "1,x"), 2, "--batch 1,x: write whole numbers above 0, with commas between them"),
        (("--against", "nowhere"), 3, "nowhere"),
        (("--keep", 0.5), 2, "this model is not moefied"),
        (("--plot", "bench.gif"), 2, "a picture's name ends in .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_timed(
    run_cli: RunCli, tiny_mixtral: Path, options: tuple[object, ...], code: int, said: str
) -> None:
    result = run_cli("bench", tiny_mixtral, *options)
    assert result.code == code
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert said in result.stderr
    assert not result.stdout
