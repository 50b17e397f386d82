"""Costs of a job: seconds, memory and scratch space by phase, summed over all of its runs.

They are kept in a file of their own, `moetool/costs.json`: all other files have equal bytes whenever a job is repeated.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from moetool.checkpoint.names import COSTS, WORK_DIRECTORY
from moetool.checkpoint.sealed import BROKEN_SEAL, read_sealed, write_sealed
from moetool.errors import ResourceError
from moetool.job.inputs import Inputs
from moetool.job.memory import PeakMemory
from moetool.job.plan import Plan, bytes_below
from moetool.job.progress import Progress
from moetool.job.result import Json, PhaseCost, PhaseTime, Printed, Result
from moetool.job.workspace import SPENT

COSTS_VERSION = 1
_SAVED_SECONDS = 10.0  # of its account, that a run may lose which is killed
_LOOKING = 0.05  # of the time, at most, goes into adding up files


@dataclass(frozen=True, kw_only=True)
class JobCosts(Printed):
    """Measured costs of a job.

    Attributes:
        runs: 1, and one more for each time that the job was gone on with.
        seconds: of all runs, what had to be done twice included.
        peak_memory_bytes: of anonymous memory of the (first) process.
        scratch_bytes: the most that unfinished work took on the disk.
        phases: in the order in which they began.
    """

    runs: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    scratch_bytes: int = 0
    phases: Sequence[PhaseCost] = ()

    def plus(self, later: "JobCosts") -> "JobCosts":
        """Add the costs of a later run of the same job: times are summed, peaks are maxima."""
        phases = {phase.name: phase for phase in self.phases}
        for phase in later.phases:
            phases[phase.name] = _joined(phases[phase.name], phase) if phase.name in phases else phase
        return JobCosts(
            runs=self.runs + later.runs,
            seconds=round(self.seconds + later.seconds, 2),
            peak_memory_bytes=max(self.peak_memory_bytes, later.peak_memory_bytes),
            scratch_bytes=max(self.scratch_bytes, later.scratch_bytes),
            phases=list(phases.values()),
        )


@dataclass(frozen=True, kw_only=True)
class ExpectedCosts(Printed):
    """Expected costs of a job, as `--dry-run` prints them; no `seconds` if this machine cannot be measured."""

    seconds: float | None = None
    peak_memory_bytes: int
    scratch_bytes: int


@dataclass
class _Spent:
    seconds: float = 0.0
    memory: int = 0
    scratch: int = 0


class Meter(Progress):
    """Passes on what it receives, and measures what each phase takes, in a `with` block.

    Attributes:
        peak: memory, of all phases and between them.
    """

    def __init__(self, progress: Progress, output: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.peak = PeakMemory()
        self._progress, self._clock, self._work = progress, clock, output / WORK_DIRECTORY
        self._phases: dict[str, _Spent] = {}
        self._expected: Sequence[PhaseTime] | None = None
        self._earlier: JobCosts | None = None
        self._phase: _Spent | None = None
        self._began = self._counted = self._saved = clock()
        self._next_look = 0.0

    def __enter__(self) -> Self:
        self.peak.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak.__exit__()
        self.save()

    @property
    def this_run(self) -> JobCosts:
        """Return time, peak memory and scratch space of this run so far, by phase and in all."""
        expected = {phase.name: phase.seconds for phase in self._expected or ()}
        phases = [
            PhaseCost(name, round(spent.seconds, 2), spent.memory, spent.scratch, expected.get(name))
            for name, spent in self._phases.items()
        ]
        return JobCosts(
            runs=1,
            seconds=round(self._clock() - self._began, 2),
            peak_memory_bytes=self.peak.bytes,
            scratch_bytes=max((spent.scratch for spent in self._phases.values()), default=0),
            phases=phases,
        )

    @property
    def all_runs(self) -> JobCosts:
        """Return the costs of this run so far and of the job's earlier runs together."""
        return (self._earlier or JobCosts()).plus(self.this_run)

    @property
    def expected_seconds(self) -> float | None:
        """The seconds that were predicted for all phases; `None` without a prediction."""
        return round(sum(phase.seconds for phase in self._expected), 2) if self._expected else None

    def keep(self, *, resumed: bool = False) -> None:
        """The workspace is this job's: from now on its account is kept there, behind that of earlier runs; if it is
        `resumed`, and that is lost, one is counted without time."""
        self._earlier = JobCosts(runs=int(resumed))
        if (found := read_sealed(self._work / SPENT)) is not None:
            with suppress(ValidationError):
                self._earlier = TypeAdapter(JobCosts).validate_python(found)

    def save(self) -> None:
        """Write the account into the workspace. A disk that is full ends the job, but not here."""
        self._saved = self._clock()
        if self._earlier is not None and self._work.is_dir():
            with suppress(ResourceError):
                write_sealed(self._work / SPENT, self.all_runs.to_json())

    def expect(self, phases: Sequence[PhaseTime]) -> None:
        """Note the expected phases of the job on the first call; later calls only update the progress display."""
        if self._expected is None:
            self._expected = phases
        self._progress.expect(phases)

    def start(self, phase: str, total: int, unit: str = "") -> None:
        self.peak.lap()
        self._phase, self._counted = self._phases.setdefault(phase, _Spent()), self._clock()
        self._look(self._phase)
        self._progress.start(phase, total, unit)

    def advance(self) -> None:
        if self._phase is not None and self._clock() >= self._next_look:
            self._look(self._phase)
        self._save_at_times()
        self._progress.advance()

    def skip(self, steps: int) -> None:
        self._progress.skip(steps)

    def finish(self, *, stopped: bool = False) -> None:
        if self._phase is not None:
            self._look(self._phase)
        self._phase = None
        self._save_at_times()
        self._progress.finish(stopped=stopped)

    def log(self, message: str) -> None:
        self._progress.log(message)

    def _save_at_times(self) -> None:
        if self._clock() - self._saved >= _SAVED_SECONDS:
            self.save()

    def _look(self, spent: _Spent) -> None:
        now = self._clock()
        spent.seconds, self._counted = spent.seconds + now - self._counted, now
        spent.memory = max(spent.memory, self.peak.lap())
        spent.scratch = max(spent.scratch, bytes_below(self._work))
        after = self._clock()
        self._next_look = after + (after - now) / _LOOKING


def _joined(one: PhaseCost, other: PhaseCost) -> PhaseCost:
    """The cost of one phase over two runs."""
    return replace(
        other,
        seconds=round(one.seconds + other.seconds, 2),
        peak_memory_bytes=max(one.peak_memory_bytes or 0, other.peak_memory_bytes or 0),
        scratch_bytes=max(one.scratch_bytes or 0, other.scratch_bytes or 0),
        expected_seconds=one.expected_seconds if other.expected_seconds is None else other.expected_seconds,
    )


def write_costs(directory: Path, source: Path, meter: Meter, plan: Plan, result: Result, inputs: Inputs) -> None:
    """Keep what a job has cost, and what it tells that the manifest does not hold, behind what is kept of the `source`;
    and of its inputs what would not be the same of a copy.

    Raises:
        ResourceError: it cannot be written.
    """
    expected = ExpectedCosts(
        seconds=meter.expected_seconds, peak_memory_bytes=plan.memory_bytes, scratch_bytes=plan.scratch_bytes
    )
    told = {**({} if result.sizes is None else result.sizes.to_json()), **result.details.to_json()}
    told = {name: value for name, value in told.items() if name != "layers"}
    job = {"stage": result.stage, **meter.all_runs.to_json(), "expected": expected.to_json(), **told}
    content: dict[str, object] = {"format_version": COSTS_VERSION, "jobs": [*read_costs(source), job]}
    if inputs.states:
        content["inputs"] = inputs.states
    write_sealed(directory / COSTS, content)


def inputs_read(directory: Path) -> object:
    """Inputs that the job which made a checkpoint noted in its costs; empty if that file is missing or damaged."""
    return (read_sealed(directory / COSTS) or {}).get("inputs", {})


def read_costs(directory: Path) -> list[dict[str, Json]]:
    """Costs of the jobs that made a checkpoint, as far as they were kept, the last job last; empty if the file is
    unreadable (`unreadable_costs`)."""
    found = _jobs(directory)
    return [] if isinstance(found, str) else [job for job in found if isinstance(job, dict)]


def unreadable_costs(directory: Path) -> str | None:
    """Why a checkpoint tells nothing of its costs, beginning with the file's name; `None` if it does."""
    found = _jobs(directory)
    return found if isinstance(found, str) else None


def _jobs(directory: Path) -> list[Json] | str:
    """What the account lists, or why it cannot be read."""
    if not (directory / COSTS).exists():
        return f"{COSTS} is not there"
    content = read_sealed(directory / COSTS)
    if content is None:
        return f"{COSTS} {BROKEN_SEAL}"
    if (version := content.get("format_version")) != COSTS_VERSION:
        return f"{COSTS} has format version {version}, and this moetool reads {COSTS_VERSION}"
    jobs = content.get("jobs")
    return jobs if isinstance(jobs, list) else f"{COSTS} lists no jobs"
