"""What becomes of a command whose terminal is closed, whose log cannot be written, or whose streams were closed."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_MOETOOL = [sys.executable, "-m", "moetool"]
# A job in small: it tells where it is, prints its result, and ends with its own exit code.
_JOB = """
import sys
from moetool.cli.streams import secure_streams
secure_streams()
print("one", file=sys.stderr)
print("result")
sys.stdout.flush()
print("two", file=sys.stderr)
sys.exit(7)
"""
full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")


def closed_terminal() -> int:
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


def unread_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def ends_with(command: list[str], *, stdout: int = subprocess.DEVNULL, stderr: int = subprocess.DEVNULL) -> int:
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, check=False)
    for descriptor in {stdout, stderr} - {subprocess.DEVNULL}:
        os.close(descriptor)
    return ended.returncode


def test_a_job_outlives_its_terminal(tiny_mixtral: Path, tmp_path: Path) -> None:
    terminal, out = closed_terminal(), tmp_path / "out"
    job = [*_MOETOOL, "decompose", str(tiny_mixtral), str(out)]
    assert ends_with(job, stdout=terminal, stderr=terminal) == 0
    assert (out / "moetool.json").is_file()


@pytest.mark.parametrize("log", [closed_terminal, unread_pipe, pytest.param(full_disk, marks=full)])
def test_a_log_that_cannot_be_written_is_dropped(log: Callable[[], int]) -> None:
    assert ends_with([sys.executable, "-c", _JOB], stderr=log()) == 7


@pytest.mark.parametrize("reader", [closed_terminal, unread_pipe])
def test_a_result_that_nobody_reads_is_no_error(reader: Callable[[], int]) -> None:
    assert ends_with([sys.executable, "-c", _JOB], stdout=reader()) == 7
    assert ends_with([*_MOETOOL, "compress", "--help"], stdout=reader()) == 0


@full
@pytest.mark.parametrize(
    "words", [["list", "targets"], ["--help"], ["--version"], ["compress", "--help"]], ids=lambda words: " ".join(words)
)
def test_a_result_on_a_full_disk_is_an_error(words: list[str]) -> None:
    stdout = full_disk()
    ended = subprocess.run([*_MOETOOL, *words], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    os.close(stdout)
    assert ended.returncode == 4
    assert ended.stderr.startswith("error: Nothing more can be written: No space left on device")


def test_nothing_that_is_printed_gets_into_a_file(tmp_path: Path) -> None:
    """The first file that a process opens has the number of a stream that was closed before."""
    file = tmp_path / "weights"
    code = _JOB.replace('print("one"', f'file = open({str(file)!r}, "w")\nprint("one"')
    ended = subprocess.run(["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code], check=False)
    assert (ended.returncode, file.read_text()) == (7, "")
    assert subprocess.run(["bash", "-c", '"$@" >&-', "bash", *_MOETOOL, "list", "targets"], check=False).returncode == 0
