"""What is said to somebody who stops a command: how it goes on, where it does."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from conftest import RunCli

from moetool import demo
from moetool.cli.commands.demo import run
from moetool.cli.display import Display
from moetool.cli.generate import guarded
from moetool.errors import InterruptedRunError


def resumable(resume: bool = False) -> None:
    raise KeyboardInterrupt


def brief() -> None:
    raise KeyboardInterrupt


def instructive() -> None:
    raise KeyboardInterrupt("It goes on.")


def test_resume_is_advised_where_there_is_such_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for command in (resumable, brief):
        with pytest.raises(typer.Exit) as ended:
            guarded(command)()
        said[command] = capsys.readouterr().err
        assert ended.value.exit_code == 130
    with pytest.raises(typer.Exit):
        guarded(instructive)()
    assert capsys.readouterr().err == "interrupted: It goes on.\n"
    assert said == {resumable: "interrupted: nothing finished is lost, go on with --resume\n", brief: "interrupted\n"}


@pytest.mark.parametrize("stopped", [KeyboardInterrupt(), InterruptedRunError("Go on with --resume.")])
def test_a_demo_starts_over(stopped: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: object) -> None:
        raise stopped

    monkeypatch.setattr(demo, "make_dense", stop)
    with pytest.raises(type(stopped)) as ended:
        run(tmp_path / "demo", 1, 0, Display())
    assert "starts over" in str(ended.value)
    assert "--resume" not in str(ended.value)


def test_sigterm_is_told(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a command that is no job, such as `eval`: it ended without a word."""
    monkeypatch.setattr("moetool.cli.app._refuse_missing", lambda _: signal.raise_signal(signal.SIGTERM))
    result = run_cli("eval", "model", "--data", "text.txt")
    assert (result.code, result.stdout, result.stderr) == (75, "", "interrupted\n")


_STOPPED_LATE = """
import os, signal, sys

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), term=signal.SIGTERM):
        kill(pid, term)

late = Late()  # gone when Python closes
sys.argv = ["moetool", "--version"]
from moetool.cli import main
main()
"""


def test_sigterm_after_a_command_has_ended_changes_nothing() -> None:
    """A job that was done and had said so ended as killed, and a batch job took it for failed."""
    ended = subprocess.run([sys.executable, "-c", _STOPPED_LATE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "moetool" in ended.stdout
