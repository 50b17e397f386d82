"""Several processes share a job: the result is that of one, byte for byte, and none of them outlives another."""

import signal
import time
from collections.abc import Callable

import pytest
from checkpoints import change_tensors, contents, copy_of
from sampling import sampled
from torch import Tensor

from moetool.job.journal import Journal

SHARDS = ("--shard-size", "20kB")


@pytest.fixture(scope="module")
def jobs(decomposed, dense, calibration, tiny_text) -> dict[str, tuple[object, ...]]:
    """One that encodes layers, one that only writes, four that read a text."""
    # Four batches.
    long = "--experts", 4, "--calibration", tiny_text, "--mix", 0, "--samples", 64, "--sequence-length", 64
    return {
        "quantize-delta": ("quantize-delta", decomposed, *SHARDS, "--group-size", 16),
        "with a text": ("quantize-delta", decomposed, *SHARDS, "--group-size", 16, *calibration),
        "export": ("export", decomposed, *SHARDS),
        "upcycle": ("upcycle", dense("llama"), *SHARDS, "--experts", 4, *calibration, "--center-router"),
        "moefy": ("moefy", dense("llama"), *SHARDS, *long),
        "snip": ("moefy", dense("opt"), *SHARDS, *long, "--baseline", "snip"),
    }


@pytest.fixture(scope="module")
def alone(crash, jobs, tmp_path_factory) -> Callable[[str], dict[str, bytes]]:
    """`alone(name)`: what one process writes."""
    made: dict[str, dict[str, bytes]] = {}

    def write(name: str) -> dict[str, bytes]:
        if name not in made:
            output = tmp_path_factory.mktemp("alone") / "model"
            assert crash(output, jobs[name])["code"] == 0
            made[name] = contents(output)
        return made[name]

    return write


@pytest.mark.parametrize(
    "name",
    sampled(("quantize-delta", "with a text", "export", "upcycle", "moefy", "snip"), ["with a text"]),
)
def test_as_one_would(crash, alone, jobs, tmp_path, name):
    expected = alone(name)
    told = crash(tmp_path / "out", jobs[name], ranks=2, rank=1)
    assert told["codes"] == [0, 0], told["stderr"]
    assert contents(tmp_path / "out") == expected
    assert told["changes"] > 3, "the second did nothing"
    assert not told["stderr"]


@pytest.mark.parametrize(
    ("killed", "at", "again"),
    sampled([(0, 5, 3), (0, 12, 1), (1, 4, 1), (1, 9, 3)], [(1, 4, 1)]),
)
def test_one_is_killed(crash, alone, jobs, tmp_path, killed, at, again):
    """The other ends by itself, resumably; any number of processes goes on."""
    output, job, began = tmp_path / "out", jobs["quantize-delta"], time.monotonic()
    codes = crash(output, job, at=at, ranks=2, rank=killed)["codes"]
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 75
    assert time.monotonic() - began < 20
    assert crash(output, (*job, "--resume"), ranks=again)["codes"] == [0] * again
    assert contents(output) == alone("quantize-delta")


@pytest.mark.exhaustive
def test_a_layer_is_settled_by_whoever_comes_back(crash, alone, jobs, tmp_path):
    """What is known of a layer, and not settled yet, is there for any number of processes."""
    output, job = tmp_path / "out", jobs["moefy"]
    assert crash(output, job, at=34, ranks=2)["codes"] == [-signal.SIGKILL, 75]
    units = Journal(output / ".moetool" / "journal.jsonl", "").units
    assert {"forward/0", "forward/1"} <= units.keys()
    assert not any(unit.startswith("neurons/") for unit in units)
    assert crash(output, (*job, "--resume"), ranks=3)["codes"] == [0] * 3
    assert contents(output) == alone("moefy")


def test_what_another_has_made_is_not_made_again(crash, alone, jobs, tmp_path):
    """The first is killed when it has noted all weight files."""
    output, job = tmp_path / "out", jobs["export"]
    changes = crash(tmp_path / "quiet", job, ranks=2)["changes"]
    assert crash(output, job, at=changes - 12, ranks=2)["codes"] == [-signal.SIGKILL, 75]
    units = Journal(output / ".moetool" / "journal.jsonl", "").units
    shards = [unit for unit in units if unit.startswith("write/")]
    assert len(shards) == len(list(output.glob("model*.safetensors"))) > 3
    before = {path.name: path.stat().st_mtime_ns for path in output.glob("model*.safetensors")}
    assert crash(output, (*job, "--resume"))["code"] == 0
    assert {path.name: path.stat().st_mtime_ns for path in output.glob("model*.safetensors")} == before
    assert contents(output) == alone("export")


@pytest.mark.parametrize("where", [0, 1])
def test_one_fails(crash, decomposed, tmp_path, where):
    """All end with its exit code, and two say why: itself, and the first."""

    def damage(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if f".layers.{where}." in name and "norm" in name)
        tensors[name].view(-1)[0] = float("nan")

    source = change_tensors(copy_of(decomposed, tmp_path / "source"), damage)
    told = crash(tmp_path / "out", ("export", source, *SHARDS), ranks=2)
    assert told["codes"] == [3, 3], told["stderr"]
    assert "NaN" in told["stderr"]
    assert ("Process 2 of 2" in told["stderr"]) == (where == 1)


@pytest.mark.parametrize("asked", sampled([0, 1], [0]))
def test_one_is_asked_to_stop(crash, alone, jobs, tmp_path, asked):
    """Who is finishes what it is at, and the first notes it."""
    output, job = tmp_path / "out", jobs["quantize-delta"]
    assert crash(output, job, at=5 - 4 * asked, sent="SIGTERM", ranks=2, rank=asked)["codes"] == [75, 75]
    units = Journal(output / ".moetool" / "journal.jsonl", "").units
    assert any(unit.startswith("write/") for unit in units)
    assert crash(output, (*job, "--resume"), ranks=2)["codes"] == [0, 0]
    assert contents(output) == alone("quantize-delta")


def test_what_cannot_work_is_said_once(crash, tiny_mixtral, tmp_path):
    told = crash(tmp_path / "out", ("quantize-delta", tiny_mixtral), ranks=2, rank=1)
    assert told["codes"] == [3, 3]
    assert not told["stderr"]
    assert not (tmp_path / "out").exists()
