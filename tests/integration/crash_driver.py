"""Runs `moetool` commands in forked children that a signal hits at a chosen moment. Not a test: a script for them.

stdin: one job per line, `{"arguments": [...], "watched": DIRECTORY, "at": N, "signal": "SIGKILL"}`. The signal is sent
just before the N-th change that the command makes to the files of the watched directory (opening one for writing,
renaming, deleting), so that a series of jobs covers every state in which a crash can leave it. A job without `at` runs
undisturbed, one with `"ranks": N` in so many processes, of which `"rank"` is the one that gets the signal. stdout: one
line for each, with its exit `code` (negative for a signal, as `subprocess` has it) and `codes` of all processes, the
number of `changes`, and what it wrote to `stderr`.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import IO, Any

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


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(job: dict[str, Any], rank: int, launched: dict[str, str], files: Sequence[IO[bytes]]) -> int:
    """Run a process of a job in a child of its own; returns its number."""
    if child := os.fork():
        return child
    stderr, report, modules = files
    code = 1
    try:
        os.environ.update(launched)
        os.dup2(stderr.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        torch.set_num_threads(1)
        at = job.get("at") if rank == job.get("rank", 0) else None
        send_at(job["watched"], at, signal.Signals[job.get("signal", "SIGKILL")], report.fileno())
        code = call(job["arguments"])
        modules.write("\n".join(sys.modules).encode())
        modules.flush()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a child of its own, or in several that share it."""
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    count, told = job.get("ranks", 1), {}
    where = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)] for _ in range(count)]
        launched = [{**where, "RANK": str(rank)} if count > 1 else {} for rank in range(count)]
        children = [start(job, rank, launched[rank], files[rank]) for rank in range(count)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        for rank, (stderr, report, modules) in enumerate(files):
            for file in (stderr, report, modules):
                file.seek(0)
            import_all(modules.read().decode().split())
            if rank == job.get("rank", 0):
                told = {"code": codes[rank], "changes": int(report.read() or b"0"), "stderr": stderr.read().decode()}
    return {**told, "codes": codes}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
