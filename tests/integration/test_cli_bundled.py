"""The calibration text that comes with moetool: where none is given, by name, and beside another."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents

from moetool.calibration.bundled import kinds

NEEDY: dict[str, tuple[object, ...]] = {
    "d2moe": ("--method", "d2moe", "--ratio", 0.3),
    "hybrid": ("--method", "hybrid", "--ratio", 0.5, "--group-size", 16),
    "auto": ("--method", "auto", "--ratio", 0.5, "--group-size", 16),
    "quantize --ratio": ("--method", "quantize", "--ratio", 0.5, "--group-size", 16),
    "error feedback": ("--method", "quantize", "--bits", 4, "--rounding", "error-feedback", "--group-size", 16),
    "reap": ("--method", "reap", "--experts", 2),
}
SMALL = ("--samples", 16, "--sequence-length", 32)


@pytest.mark.parametrize("method", NEEDY)
def test_a_plan_names_it_where_no_text_is_given(run_cli: Any, tiny_mixtral: Path, tmp_path: Path, method: str) -> None:
    planned = run_cli("compress", tiny_mixtral, tmp_path / "out", *NEEDY[method], *SMALL, "--dry-run", "--json")
    assert planned.code == 0, planned.stderr
    assert planned.json["calibration"] == "bundled"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("upcycle", ("--experts", 4, "--center-router")),
        ("moefy", ("--experts", 4, "--selector", "oracle")),
    ],
)
def test_other_commands_take_it_too(
    run_cli: Any, dense: Any, tmp_path: Path, command: str, options: tuple[object, ...]
) -> None:
    planned = run_cli(command, dense("llama"), tmp_path / "out", *options, *SMALL, "--dry-run", "--json")
    assert planned.code == 0, planned.stderr
    assert planned.json["calibration"] == "bundled"


def test_what_needs_no_text_takes_none(run_cli: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    options = ("--method", "quantize", "--bits", 4, "--group-size", 16, "--dry-run", "--json")
    assert "calibration" not in run_cli("compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", *options).json


def test_calibrated_on_it(run_cli: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    """None given is the same as its name, and the card names it."""
    made = run_cli("compress", tiny_mixtral, tmp_path / "out", *NEEDY["reap"], *SMALL, "--json")
    assert made.code == 0, made.stderr
    assert made.json["calibration"]["windows"] == 16
    named = ("--calibration", "bundled")
    assert run_cli("compress", tiny_mixtral, tmp_path / "named", *NEEDY["reap"], *SMALL, *named).code == 0
    assert contents(tmp_path / "named") == contents(tmp_path / "out")
    assert "bundled" in (tmp_path / "out" / "README.md").read_text()


def test_evaluated_on_a_kind(run_cli: Any, tiny_mixtral: Path) -> None:
    found = run_cli("eval", tiny_mixtral, "--data", "bundled:dialogue", "--windows", 2, "--json")
    assert found.code == 0, found.stderr
    assert found.json["windows"] == 2


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("bundled:cod", ["no kind 'cod'", "Did you mean code?", *kinds()]),
        ("bundled:code:train", ["neither splits nor columns"]),
    ],
)
def test_what_it_does_not_have(run_cli: Any, tiny_mixtral: Path, tmp_path: Path, data: str, says: list[str]) -> None:
    result = run_cli("compress", tiny_mixtral, tmp_path / "out", *NEEDY["reap"], "--calibration", data, "--dry-run")
    assert result.code == 2
    assert all(words in result.stderr for words in says), result.stderr


def test_a_folder_of_that_name_is_meant_where_there_is_one(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bundled").mkdir()
    (tmp_path / "bundled" / "own.txt").write_text("too short")
    monkeypatch.chdir(tmp_path)
    result = run_cli("compress", tiny_mixtral, "out", *NEEDY["reap"], *SMALL, "--calibration", "bundled")
    assert result.code == 3
    assert "one window needs" in result.stderr
