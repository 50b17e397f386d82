"""`scripts/on_card.sh`: what it would run is there, and takes no longer than it may."""

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "on_card.sh"
TESTS = Path(__file__).parent


def test_all_parts_would_start(tmp_path: Path) -> None:
    results = tmp_path / "on_card.md"
    finished = subprocess.run(
        [SCRIPT, "--dry", results], env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    told = results.read_text()
    parts = re.findall(r"^## (.*): passed$", told, re.MULTILINE)
    assert len(parts) == len(re.findall(r"^part ", SCRIPT.read_text(), re.MULTILINE)) >= 7
    assert sum(map(int, re.findall(r"at most (\d+)\.$", told, re.MULTILINE))) <= 9 * 60
    for command in re.findall(r"^`python (scripts/\S+) (.*)`", told, re.MULTILINE):
        source = (SCRIPT.parents[1] / command[0]).read_text()
        assert [option for option in re.findall(r"--[a-z-]+", command[1]) if f'"{option}"' not in source] == []


def test_it_fails_if_a_part_does(tmp_path: Path) -> None:
    """And goes on with the next: here python knows no more than how to fail."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho broken; exit 3\n")
    python.chmod(0o755)
    results = tmp_path / "on_card.md"
    finished = subprocess.run([SCRIPT, results], env=os.environ | {"PYTHON": str(python)}, capture_output=True)
    assert finished.returncode == 1
    assert results.read_text().count("FAILED with code 3") == len(
        re.findall(r"^part ", SCRIPT.read_text(), re.MULTILINE)
    )


def test_it_runs_all_tests_that_want_a_card() -> None:
    marked = [file for file in TESTS.rglob("test_*.py") if re.search(r"pytest\.mark\.cuda\b", file.read_text())]
    named = re.findall(r"tests/\S+", SCRIPT.read_text())
    places = [TESTS.parent / name for name in named]
    assert len(marked) > 3
    assert [file for file in marked if not {file, *file.parents} & {*places} and file != Path(__file__)] == []
