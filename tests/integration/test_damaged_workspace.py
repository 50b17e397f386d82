"""Whatever happens to the files of an unfinished run: going on with it gives the bytes of an undisturbed one."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents, copy_of
from sampling import sampled

from moetool.job.execute import run_stage
from moetool.job.result import Result
from moetool.job.workspace import Workspace
from moetool.stages import stages

# A unit at whose end each job is killed: in the middle of the way back, and among the weight files.
KILLED_AT = {"d2moe": "reverse/0", "hybrid": "write/1"}
OPTIONS: dict[str, dict[str, Any]] = {
    "d2moe": {"rank": 4},
    "hybrid": {"ratio": 0.3, "group_size": 16},
}


class KilledError(BaseException):
    """What stands for a signal that nothing catches."""


@pytest.fixture(scope="module")
def smallest(make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_mixtral(num_hidden_layers=2, num_local_experts=3, intermediate_size=32)
    return save_model(model, tmp_path_factory.mktemp("models") / "smallest")


@pytest.fixture(scope="module")
def start(smallest: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Result]]:
    """`start(method, output, resume=True)`: a job as the command line starts it, without waiting for the disk."""
    short = tmp_path_factory.mktemp("text") / "short.txt"
    short.write_text(tiny_text.read_text()[:4000])

    def start(method: str, output: Path, **how: Any) -> Result:
        text = {"calibration": str(short), "mix": 0, "samples": 2, "sequence_length": 16, "shard_size": 30_000}
        options = stages()[method].options_type.model_validate({**text, **OPTIONS[method]})
        return run_stage(stages()[method], smallest, output, options, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield start


@pytest.fixture(scope="module", params=sampled(KILLED_AT, ["d2moe"]))
def job(
    request: pytest.FixtureRequest, start: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, bytes]]:
    """A method, an output that was killed on its way, and what an undisturbed run writes."""
    method, where = request.param, tmp_path_factory.mktemp("damaged")
    start(method, where / "quiet")
    with pytest.MonkeyPatch.context() as patch:
        right = Workspace.done

        def done(self: Workspace, unit: str, **options: Any) -> None:
            if unit == KILLED_AT[method]:
                raise KilledError
            right(self, unit, **options)

        patch.setattr(Workspace, "done", done)
        patch.setattr(Workspace, "abandon", lambda self: self._lock.release())
        with pytest.raises(KilledError):
            start(method, where / "killed")
    return method, where / "killed", contents(where / "quiet")


def damages(killed: Path) -> Iterator[tuple[str, str, bytes | None]]:
    """Every file of an output, in turn in each way, the journal in all: its name, what was done, what it holds now."""
    for turn, (name, data) in enumerate(contents(killed).items()):
        ways = {
            "flip header": data[:12] + bytes([data[12] ^ 1]) + data[13:],
            "delete": None,
            "flip data": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
            "halve": data[: len(data) // 2],
            "empty": b"",
        }
        if not name.endswith("journal.jsonl"):
            ways = dict([list(ways.items())[turn % len(ways)]])
        for what, damaged in ways.items():
            yield name, what, damaged
        if name.endswith("journal.jsonl"):
            for number, line in enumerate(data.splitlines(keepends=True)):
                garbled = b"\0" * (len(line) - 1) + b"\n" if number % 2 else b""
                yield name, f"lose line {number}", data.replace(line, garbled)


def test_a_damaged_workspace(job: tuple[str, Path, dict[str, bytes]], start: Any, tmp_path: Path) -> None:
    method, killed, quiet = job
    tried = 0
    for name, what, data in damages(killed):
        output = copy_of(killed, tmp_path / str(tried))
        (output / name).unlink()
        if data is not None:
            (output / name).write_bytes(data)
        start(method, output, resume=True)
        assert contents(output) == quiet, (name, what)
        tried += 1
    assert tried > 12
