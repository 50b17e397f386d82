"""What a job costs, on its way, over several runs, and beside its result."""

from contextlib import suppress
from pathlib import Path

from moetool.checkpoint.names import COSTS, WORK_DIRECTORY
from moetool.checkpoint.sealed import read_sealed, write_sealed
from moetool.job.metering import JobCosts, Meter, read_costs
from moetool.job.progress import Progress, phase
from moetool.job.result import PhaseCost, PhaseTime


def test_a_phase_that_comes_again_adds_to_the_first(tmp_path: Path) -> None:
    now = [0.0]
    meter = Meter(Progress(), tmp_path, lambda: now[0])
    meter.expect([PhaseTime("Write", 2.0)])
    for name, seconds in (("Check", 1.0), ("Write", 2.5), ("Check", 0.25)):
        with phase(meter, name, 1, "layers"):
            now[0] += seconds
        now[0] += 10  # between phases
    found = meter.this_run
    assert [(each.name, each.seconds, each.expected_seconds) for each in found.phases] == [
        ("Check", 1.25, None),
        ("Write", 2.5, 2.0),
    ]
    assert found.seconds == 33.75
    assert min(each.peak_memory_bytes or 0 for each in found.phases) > 1e6


def test_a_phase_that_fails_is_counted_too(tmp_path: Path) -> None:
    now = [0.0]
    meter = Meter(Progress(), tmp_path, lambda: now[0])
    with suppress(RuntimeError), phase(meter, "Write", 1, "layers"):
        now[0] += 3
        raise RuntimeError
    assert [each.seconds for each in meter.this_run.phases] == [3.0]


def test_memory_and_scratch_are_those_of_each_phase(tmp_path: Path) -> None:
    work = tmp_path / WORK_DIRECTORY
    work.mkdir()
    meter = Meter(Progress(), tmp_path)
    with phase(meter, "Forward", 1, "layers"):
        (work / "hidden").write_bytes(bytes(5000))
        held = bytearray(b"x") * 200_000_000
        meter.advance()
        del held
    (work / "hidden").unlink()
    with phase(meter, "Write", 1, "layers"):
        meter.advance()
    forward, write = meter.this_run.phases
    assert (forward.scratch_bytes, write.scratch_bytes) == (5000, 0)
    assert (forward.peak_memory_bytes or 0) - (write.peak_memory_bytes or 0) > 150_000_000
    assert meter.this_run.scratch_bytes == 5000


def test_runs_add_up_whatever_became_of_them(tmp_path: Path) -> None:
    """What was saved last counts, though the process was killed; what is damaged does not."""
    work, now = tmp_path / WORK_DIRECTORY, [0.0]
    work.mkdir()

    def run(seconds: float) -> JobCosts:
        meter = Meter(Progress(), tmp_path, lambda: now[0])
        meter.keep()
        meter.start("Forward", 2)
        now[0] += seconds
        meter.advance()
        now[0] += 0.5  # and the process is gone
        return meter.all_runs

    first, second = run(60.0), run(20.0)
    assert (first.runs, first.seconds) == (1, 60.5)
    assert (second.runs, second.seconds) == (2, 80.5)
    assert [each.seconds for each in second.phases] == [80.0]
    kept = work / "costs.json"
    kept.write_bytes(kept.read_bytes().replace(b"80.0", b"90.0"))
    assert (run(1.0).runs, kept.exists()) == (1, True)


def test_the_largest_and_the_sum() -> None:
    def costs(name: str, seconds: float, memory: int, scratch: int) -> JobCosts:
        phases = [PhaseCost(name, seconds, memory, scratch)]
        return JobCosts(
            runs=1, seconds=seconds, peak_memory_bytes=memory, scratch_bytes=scratch, phases=phases
        )  # fmt: skip

    both = costs("Write", 2.0, 30, 4).plus(costs("Write", 3.0, 20, 5))
    assert both == JobCosts(
        runs=2, seconds=5.0, peak_memory_bytes=30, scratch_bytes=5, phases=[PhaseCost("Write", 5.0, 30, 5)]
    )
    assert [each.name for each in both.plus(costs("Verify", 1.0, 1, 1)).phases] == ["Write", "Verify"]


def test_every_bit_of_what_is_kept_counts(tmp_path: Path) -> None:
    write_sealed(tmp_path / COSTS, {"format_version": 1, "jobs": [{"stage": "tune", "seconds": 1e-5}]})
    assert read_costs(tmp_path) == [{"stage": "tune", "seconds": 1e-5}]
    right = (tmp_path / COSTS).read_bytes()
    for position in range(len(right)):
        for bit in range(8):
            damaged = bytearray(right)
            damaged[position] ^= 1 << bit
            (tmp_path / COSTS).write_bytes(damaged)
            assert read_sealed(tmp_path / COSTS) is None, (position, bit)
    assert read_costs(tmp_path) == []
    assert read_costs(tmp_path / "absent") == []
