"""What the demo says to try: lines that work in the shell it was started from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetool.cli.next_step import try_next


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`.venv/bin` below the working directory with a `moetool` that repeats its arguments; not on the path."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "moetool").write_text('#!/bin/sh\necho "got $@"\n')
    (programs / "moetool").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", [".venv/bin/moetool"])
    return programs


def said_by(lines: list[str]) -> str:
    """What a shell prints that is given these lines."""
    return subprocess.run(["bash", "-ec", "\n".join(lines)], capture_output=True, text=True, check=True).stdout


def test_with_an_environment_that_is_not_active(environment):
    (environment / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    lines = try_next("inspect x")
    assert lines[0].startswith("source .venv/bin/activate ")
    assert ".venv/bin/moetool" in lines[0]
    assert said_by(lines) == "got inspect x\n"


def test_without_one(environment):
    assert try_next("inspect x") == [".venv/bin/moetool inspect x"]
    assert said_by(try_next("inspect x")) == "got inspect x\n"


def test_on_the_path(environment, monkeypatch):
    monkeypatch.setenv("PATH", f"{environment}:{os.environ['PATH']}")
    assert try_next("inspect x") == ["moetool inspect x"]


def test_as_a_module(environment, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/moetool/__main__.py"])
    assert try_next("list") == [f"{sys.executable} -m moetool list"]
