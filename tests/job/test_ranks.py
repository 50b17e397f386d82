"""What processes that share a job tell one another."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moetool.errors import InterruptedRunError
from moetool.job.interrupt import Interrupt
from moetool.job.ranks import Ranks, joined

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
except MoetoolError as error:
    found["error"] = [type(error).__name__, str(error)]
except SystemExit as error:
    found["error"] = error.code
open(f"{sys.argv[1]}.{os.environ['RANK']}", "w").write(json.dumps(found))
if os.environ["RANK"] == "0":
    os.wait()
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


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What each of two processes found out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    there = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    told = tmp_path_factory.mktemp("ranks") / "told"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", TWO, str(told)]
    subprocess.run(command, check=True, env={**os.environ, **there}, timeout=120)
    return [json.loads(Path(f"{told}.{rank}").read_text()) for rank in range(2)]


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
    assert two[1]["error"] == ["InvalidInputError", "it is bad"]
    assert two[0]["error"] == ["InvalidInputError", "Process 2 of 2: it is bad"]


@pytest.mark.parametrize(("rank", "raised"), [(0, InterruptedRunError), (1, SystemExit)])
def test_a_stop_of_a_training_is_told_by_the_first_alone(
    monkeypatch: pytest.MonkeyPatch, rank: int, raised: type[BaseException]
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(raised) as found, joined(has_trainer=True):
        Interrupt().stop()
    code = found.value.code if isinstance(found.value, SystemExit) else InterruptedRunError.exit_code
    assert code == 75
