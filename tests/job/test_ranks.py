"""What processes that share a job tell one another."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moetool.job.ranks import Ranks

# How both scripts end: each process writes what it has found, and the first waits for the second.
ENDING = """
except MoetoolError as error:
    found["error"] = [type(error).__name__, str(error)]
except SystemExit as error:
    found["error"] = error.code
open(f"{sys.argv[1]}.{os.environ['RANK']}", "w").write(json.dumps(found))
if os.environ["RANK"] == "0":
    os.wait()
"""

TWO = """
import json, os, sys
import torch
from moetool.errors import InvalidInputError, MoetoolError
from moetool.job.ranks import JoinedRanks

torch.set_num_threads(1)
os.environ["RANK"] = str(int(os.fork() == 0))
found = {}
try:
    with JoinedRanks() as ranks:
        found["first"] = ranks.is_first
        found["gathered"] = ranks.gather({"rank": ranks.rank})
        found["from the second"] = ranks.broadcast(bytes(ranks.rank) * 20_000_000, 1) == bytes(1) * 20_000_000
        for owner in range(2):
            own = torch.full((3,), ranks.rank + 1.0)
            ranks.reduce(own, owner)
            found[f"reduced to {owner}"] = own.tolist() if ranks.rank == owner else None
        own = torch.full((2, 2), ranks.rank + 1.0, dtype=torch.float64)
        ranks.all_reduce(own)
        found["summed"] = own.tolist()
        if not ranks.is_first:
            for note in range(3):
                ranks.post([note, "of the second"])
        ranks.barrier()
        found["posted"] = list(ranks.posted())
        if not ranks.is_first:
            raise InvalidInputError("it is bad")
        while True:  # as long work would
            sum(range(1000))
"""

# A Trainer's: the second fails before the Trainer connects them, or while the first waits for it there, or where that
# cannot come back.
TRAINED = """
import ctypes, json, os, signal, sys
import torch.distributed as dist
from moetool.errors import InvalidInputError, MoetoolError
from moetool.job import watch
from moetool.job.ranks import joined

watch.LEAVE_SECONDS = 2
watch.STUCK_SECONDS = 2 if sys.argv[2] == "stuck" else 60
os.environ["RANK"] = str(int(os.fork() == 0))
found = {}
try:
    with joined(has_trainer=True) as ranks:
        found["size"] = ranks.size
        found["threads"] = ranks.broadcast(3 + ranks.rank)
        found["stops"] = [ranks.is_stopping(False), ranks.is_stopping(ranks.rank == 1)]
        if sys.argv[2] in ("late", "gone"):
            dist.init_process_group("gloo")
        if sys.argv[2] == "gone":
            if not ranks.is_first:
                os._exit(9)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
            watch.time.sleep = lambda _: os.kill(os.getpid(), signal.SIGTERM)
        if not ranks.is_first:
            raise InvalidInputError("it is bad")
        if sys.argv[2] == "stuck":
            ctypes.CDLL(None).sleep(1000)
        ranks.barrier() if sys.argv[2] == "early" else dist.barrier()
"""


def test_one_process_is_all() -> None:
    with Ranks() as ranks:
        summed = torch.ones(2)
        ranks.all_reduce(summed)
        ranks.reduce(summed, 0)
        ranks.barrier()
        assert summed.tolist() == [1, 1]
        assert ranks.is_first
        assert ranks.gather(3) == [3]
        assert ranks.broadcast("said") == "said"
        assert list(ranks.posted()) == []


def _run(script: str, told: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script that forks a second process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    there = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script + ENDING, str(told), *arguments]
    environment = {**os.environ, **there}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)


def _found(script: str, told: Path, *arguments: str) -> list[dict[str, object]]:
    """What each of two processes of a script found out."""
    done = _run(script, told, *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"{told}.{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    return _found(TWO, tmp_path_factory.mktemp("ranks") / "told")


def test_two_tell_one_another(two: list[dict[str, object]]) -> None:
    first, second = two
    for found in two:
        assert found["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert found["from the second"]
        assert found["summed"] == [[3, 3], [3, 3]]
    assert (first["first"], second["first"]) == (True, False)
    assert first["reduced to 0"] == second["reduced to 1"] == [3, 3, 3]
    assert first["posted"] == [[note, "of the second"] for note in range(3)]
    assert second["posted"] == []


def test_work_ends_when_another_fails(two: list[dict[str, object]]) -> None:
    assert two[1]["error"] == 3, "the first tells it"
    assert two[0]["error"] == ["InvalidInputError", "Process 2 of 2: it is bad"]


def test_who_waits_for_a_trainers_process_ends_when_it_fails(tmp_path: Path) -> None:
    first, second = _found(TRAINED, tmp_path / "early", "early")
    for found in (first, second):
        assert found["size"] == 1, "they share no units"
        assert found["threads"] == 3
        assert found["stops"] == [False, True]
    assert first["error"] == ["InvalidInputError", "Process 2 of 2: it is bad"]
    assert second["error"] == 3, "the first tells it"


def test_a_trainers_broken_connection_is_what_broke_it(tmp_path: Path) -> None:
    first, second = _found(TRAINED, tmp_path / "late", "late")
    assert first["error"] == ["InvalidInputError", "Process 2 of 2: it is bad"]
    assert second["error"] == ["InvalidInputError", "it is bad"], "it cannot know whether the first tells it"


def test_a_process_that_does_not_come_back_is_ended(tmp_path: Path) -> None:
    done = _run(TRAINED, tmp_path / "stuck", "stuck")
    assert done.returncode == 3, done.stderr
    assert "error: Process 2 of 2: it is bad" in done.stderr


def test_who_is_left_has_the_last_word_though_a_launcher_asks_it_to_stop(tmp_path: Path) -> None:
    done = _run(TRAINED, tmp_path / "gone", "gone")
    assert done.returncode == 0, done.stderr
    kind, message = json.loads((tmp_path / "gone.0").read_text())["error"]
    assert kind == "InterruptedRunError"
    assert "A process of this job's 2 is gone. Go on with --resume" in message
