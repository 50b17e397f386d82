"""Runs `moetool` commands in forked children that a signal hits at a chosen moment. Not a test: a script for them.

stdin: one job per line, `{"arguments": [...], "watched": DIRECTORY, "at": N, "signal": "SIGKILL"}`. The signal is sent
just before the N-th change that the command makes to the files of the watched directory (opening one for writing,
renaming, deleting), so that a series of jobs covers every state in which a crash can leave it. A job without `at` runs
undisturbed. stdout: one line for each, with its exit `code` (negative for a signal, as `subprocess` has it), the number
of `changes`, and what it wrote to `stderr`.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from moetool.cli import main

CHANGES = {"os.rename": 1, "os.remove": 0, "os.rmdir": 0, "open": 0}  # audit event → argument that is the path
WRITING = os.O_WRONLY | os.O_RDWR


def send_at(watched: str, at: int | None, number: int, report: int) -> None:
    """Count changes below `watched`, and signal this process before the one numbered `at`."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in CHANGES or (event == "open" and not arguments[2] & WRITING):
            return
        by_rmtree = event in ("os.remove", "os.rmdir") and arguments[1] not in (None, -1)  # relative to a directory
        if not by_rmtree and not str(arguments[CHANGES[event]]).startswith(watched):
            return
        seen += 1
        os.pwrite(report, str(seen).encode(), 0)
        if seen == at:
            os.kill(os.getpid(), number)

    sys.addaudithook(hook)


def call(arguments: Sequence[str]) -> int:
    """The script's exit code."""
    sys.argv = ["moetool", *arguments]
    try:
        main()
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def import_all(names: Sequence[str]) -> None:
    """Import what a child did, so that the next need not. No more than that: torch's threads do not survive a fork."""
    for name in names:
        if name.startswith(("moetool", "transformers", "tokenizers", "torch", "datasets")) and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a child of its own."""
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with (
        tempfile.TemporaryFile() as stderr,
        tempfile.TemporaryFile() as report,
        tempfile.TemporaryFile() as modules,
    ):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(stderr.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                number = signal.Signals[job.get("signal", "SIGKILL")]
                torch.set_num_threads(1)
                send_at(job["watched"], job.get("at"), number, report.fileno())
                code = call(job["arguments"])
                modules.write("\n".join(sys.modules).encode())
                modules.flush()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        stderr.seek(0)
        report.seek(0)
        modules.seek(0)
        import_all(modules.read().decode().split())
        return {
            "code": os.waitstatus_to_exitcode(status),
            "changes": int(report.read() or b"0"),
            "stderr": stderr.read().decode(),
        }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
