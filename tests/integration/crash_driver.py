"""Runs `moetool` commands in forked children that a signal hits at a chosen moment. Not a test: a script for them.

stdin: one job per line, `{"arguments": [...], "watched": DIRECTORY, "at": N, "signal": "SIGKILL"}`. The signal is sent
just before the N-th change that the command makes to the files of the watched directory (opening one for writing,
renaming, deleting), so that a series of jobs covers every state in which a crash can leave it; where `at` is a part of
a path, every process gets it that begins to write there. A job without `at` runs undisturbed, one with `"ranks": N` in
so many processes, of which `"rank"` is the one that gets the signal, and with the `"environment"` of a launcher.
stdout: one line for each, with its exit `code` (negative for a signal, as `subprocess` has it) and `codes` of all
processes, the number of `changes`, what it wrote to `stdout` and `stderr`, and what each process `said` on stderr.
"""

import contextlib
import gc
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
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from moetool.cli import main
from moetool.stages import stages

CHANGES = {"os.rename": 1, "os.remove": 0, "os.rmdir": 0, "open": 0}  # audit event → argument that is the path
WRITING = os.O_WRONLY | os.O_RDWR


def send_at(watched: str, at: int | str | None, number: int, report: int) -> None:
    """Count changes below `watched`, and signal this process before the one numbered `at`, or a write there."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        is_write = event == "os.mkdir" or (event == "open" and arguments[2] & WRITING)
        if isinstance(at, str) and is_write and at in str(arguments[0]):
            os.kill(os.getpid(), number)
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


def prepare() -> None:
    """Do once what every job would do for itself."""
    os.fsync = os.fstat  # a process that is killed leaves what it wrote: nobody has to wait for the disk
    stages()
    get_checkpoint_conversion_mapping("")
    gc.freeze()


def import_all(names: Sequence[str]) -> None:
    """Import what a child did, so that the next need not. No more than that: torch's threads do not survive a fork."""
    for name in names:
        if name.startswith(("moetool", "transformers", "tokenizers", "torch", "datasets")) and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.freeze()  # so that no child looks at all that, and copies it


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(job: dict[str, Any], rank: int, launched: dict[str, str], files: Sequence[IO[bytes]]) -> int:
    """Run a process of a job in a child of its own; returns its number."""
    if child := os.fork():
        return child
    stdout, stderr, report, modules = files
    code = 1
    try:
        os.environ.update(launched)
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        torch.set_num_threads(1)
        if "ACCELERATE_USE_FSDP" in os.environ:
            importlib.import_module("sharding").shard_on_processors()
        at = job.get("at") if isinstance(job.get("at"), str) or rank == job.get("rank", 0) else None
        send_at(job["watched"], at, signal.Signals[job.get("signal", "SIGKILL")], report.fileno())
        code = call(job["arguments"])
        modules.write("\n".join(sys.modules).encode())
        modules.flush()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a child of its own, or in several that share it."""
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    count, told = job.get("ranks", 1), {}
    said: list[str] = []
    where = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **job.get("environment", {}),
    }
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)] for _ in range(count)]
        launched = [{**where, "RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {} for rank in range(count)]
        children = [start(job, rank, launched[rank], files[rank]) for rank in range(count)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        for rank, own in enumerate(files):
            for file in own:
                file.seek(0)
            stdout, stderr, report, modules = (file.read().decode() for file in own)
            import_all(modules.split())
            said.append(stderr)
            if rank == job.get("rank", 0):
                told = {"code": codes[rank], "changes": int(report or 0), "stdout": stdout, "stderr": stderr}
    return {**told, "codes": codes, "said": said}


if __name__ == "__main__":
    prepare()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
