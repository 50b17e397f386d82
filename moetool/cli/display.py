"""Progress and log on stderr, with a heartbeat in long jobs; results on stdout, for people or as JSON."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from moetool.checkpoint.sizes import format_bytes
from moetool.cli.events import LOG_HELP, EventLog, logged, started
from moetool.job import progress
from moetool.job.forecast import Forecast, format_seconds
from moetool.job.memory import anonymous_bytes
from moetool.job.result import Json, PhaseTime, Printed

HEARTBEAT_SECONDS = 30.0
_SAMPLED_SECONDS = 1.0
SCHEMA_VERSION = 1  # of what `--json` prints: one more when a field goes or changes its meaning, not when one is added


@dataclass(frozen=True)
class Pulse(Printed):
    """Progress of a job at one moment: phase, rate, memory, time left.

    Attributes:
        phase: at work.
        done, total: steps of the phase, those of earlier runs left out; 0 where they are not counted.
        unit: what each step is one of (layers, windows, files); empty where they are not counted.
        units_per_second: in this phase.
        memory_bytes, peak_memory_bytes: anonymous memory, now and the most that was seen of it once a second.
        seconds_left: of the whole job where that is known (`in_all`), else of the phase; `None` if neither is.
        in_all: which.
    """

    phase: str
    done: int
    total: int
    unit: str
    units_per_second: float
    memory_bytes: int
    peak_memory_bytes: int
    seconds_left: float | None
    in_all: bool

    def __str__(self) -> str:
        rate = self.units_per_second
        pace = f", {rate:.1f} per s" if rate >= 1 else f", {1 / rate:.1f} s each" if rate else ""
        left = ""
        if self.seconds_left is not None:
            left = f", about {format_seconds(self.seconds_left)} left{' in all' if self.in_all else ''}"
        memory = f"memory {format_bytes(self.memory_bytes)} (peak {format_bytes(self.peak_memory_bytes)})"
        where = f"{_counted(self.done, self.total, self.unit)}{pace}, " if self.total else ""
        return f"{self.phase}: {where}{memory}{left}"


def _counted(done: int, total: int, unit: str) -> str:
    return f"{done:,} of {total:,} {unit}".rstrip()


class Heartbeat:
    """A thread that calls `beat(memory, peak)`, in bytes, every `interval` seconds until it is stopped."""

    def __init__(
        self,
        beat: Callable[[int, int], None],
        interval: float = HEARTBEAT_SECONDS,
        sampled: float = _SAMPLED_SECONDS,
        peak: int = 0,
    ) -> None:
        self.peak = peak
        self._beat, self._interval, self._sampled = beat, interval, sampled
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        spoke = time.monotonic()
        while not self._stop.wait(self._sampled):
            memory = anonymous_bytes()
            self.peak = max(self.peak, memory)
            if time.monotonic() - spoke >= self._interval:
                spoke = time.monotonic()
                self._beat(memory, self.peak)

    def stop(self) -> None:
        """End the heartbeat; no event of it is written after this returns."""
        self._stop.set()
        self._thread.join()


AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


class _JobRemaining(ProgressColumn):
    """Column of the progress bar: the time that the whole job has left."""

    def __init__(self, forecast: Forecast) -> None:
        super().__init__()
        self._forecast = forecast

    def render(self, task: Task) -> Text:
        left = self._forecast.seconds_left
        return Text("" if left is None else f"{format_seconds(left)} left in all", style="progress.remaining")


class Display(progress.Progress):
    """Progress of a job: a bar on a terminal, otherwise a line per phase and a heartbeat. Both tell the time that the
    job has left, or if nothing was predicted for it the phase. All of it goes to a log of events, too, if there is one.
    """

    def __init__(self, events: EventLog | None = None) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._events = events
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._heart: Heartbeat | None = None
        self._phase, self._unit, self._total, self._done, self._peak = "", "", 0, 0, 0
        self._began = 0.0
        self._forecast: Forecast | None = None

    def expect(self, phases: Sequence[PhaseTime]) -> None:
        """Begin a job of these phases, with the seconds that each is expected to take."""
        self._forecast = Forecast(phases) if phases else None
        self._note("expected", phases=[phase.to_json() for phase in phases])

    def start(self, phase: str, total: int, unit: str = "") -> None:
        """Begin a phase of `total` steps, each one of `unit`, with a progress bar if stderr is a terminal."""
        self._phase, self._unit, self._total, self._done = phase, unit, total, 0
        self._began = time.monotonic()
        if self._forecast is not None:
            self._forecast.start(phase, total)
        if self._console.is_terminal and total:
            self._bar = Progress(
                TextColumn("{task.description:>14}"),
                BarColumn(),
                TextColumn(f"{{task.completed:,}}/{{task.total:,}} {unit}", style="progress.download"),
                _JobRemaining(self._forecast) if self._forecast else TimeRemainingColumn(elapsed_when_finished=True),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task(phase, total=total)
        elif self._forecast is not None and (left := self._forecast.seconds_left or 0) >= HEARTBEAT_SECONDS:
            counted = f" ({total:,} {unit})" if total else ""
            self._console.print(f"{phase}{counted}: begins, about {format_seconds(left)} left in all")
        self._note("phase_began", phase=phase, total=total, unit=unit)
        if self._bar is None or self._events is not None:
            self._heart = Heartbeat(self.beat, peak=self._peak)

    def beat(self, memory: int, peak: int) -> None:
        """A sign of life, with the anonymous memory in bytes now and at most."""
        left, took = None, time.monotonic() - self._began
        if self._forecast is not None:
            left = self._forecast.seconds_left
        elif self._done:
            left = took / self._done * max(self._total - self._done, 0)
        rate = self._done / took if took > 0 else 0.0
        in_all = self._forecast is not None
        pulse = Pulse(self._phase, self._done, self._total, self._unit, rate, memory, peak, left, in_all)
        if self._bar is None:
            self._console.print(str(pulse))
        self._note("heartbeat", **pulse.to_json())

    def advance(self) -> None:
        """Count one finished step of the current phase in bar, forecast and event log."""
        self._done += 1
        if self._forecast is not None:
            self._forecast.advance()
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
        self._note("unit_done", phase=self._phase, done=self._done, total=self._total)

    def skip(self, steps: int) -> None:
        """Count steps of the current phase that an earlier run had finished."""
        self._total -= steps
        if self._forecast is not None:
            self._forecast.skip(steps)
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, steps)
        self._note("units_skipped", phase=self._phase, steps=steps, total=self._total)

    def finish(self, *, stopped: bool = False) -> None:
        """End the current phase; one that was `stopped` on its way keeps its bar where it is, and a line says where."""
        if self._heart is not None:
            self._heart.stop()
            self._peak, self._heart = self._heart.peak, None
        if self._forecast is not None:
            self._forecast.finish()
        seconds = time.monotonic() - self._began
        if self._bar is not None and self._task is not None:
            if not stopped:
                self._bar.update(self._task, completed=self._bar.tasks[0].total)
            self._bar.stop()
            self._bar = self._task = None
        elif not stopped:
            self._console.print(f"{self._phase}: done in {seconds:.0f} s")
        if stopped:
            where = f"at {_counted(self._done, self._total, self._unit)} " if self._total else ""
            self._console.print(f"{self._phase}: stopped {where}after {seconds:.0f} s")
        fields: dict[str, Json] = {"done": self._done, "total": self._total, "seconds": round(seconds, 3)}
        self._note("phase_ended", phase=self._phase, **fields, stopped=stopped)

    def log(self, message: str) -> None:
        """Print a line to stderr above the progress bar, and record it in the event log."""
        self._console.print(message)
        self._note("message", message=message)

    def _note(self, event: str, **fields: Json) -> None:
        if self._events is not None:
            self._events.write(event, **fields)


def print_json(result: Mapping[str, Json]) -> None:
    """One JSON object on stdout, with the version of its fields (docs/json.md). NaN and infinity, which JSON does not
    know, are null."""
    print(json.dumps(versioned(result), indent=2, allow_nan=False))


def versioned(result: Mapping[str, Json]) -> Mapping[str, Json]:
    """What is printed or written of a result: its fields, with their version, and null for NaN and infinity."""
    return {"schema_version": SCHEMA_VERSION, **{name: _finite(value) for name, value in result.items()}}


def _finite(value: Json) -> Json:
    """A JSON value with null for every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print aligned `name  value` lines on stdout."""
    rows = list(fields)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, numbers: bool = True
) -> None:
    """A table on stdout; the first column to the left, the others to the right if they hold numbers."""
    table = Table()
    for position, header in enumerate(headers):
        table.add_column(header, justify="right" if position and numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Piped output has no width of its own; a table must not be cut to 80 columns then.
    width = None if sys.stdout.isatty() else 1000
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=width)
    if title is not None:
        console.print(title, style="bold")  # a table's own title is cut into lines of the table's width
    console.print(table)


LogJson = Annotated[Path | None, typer.Option("--log-json", help=LOG_HELP)]


@contextmanager
def watched(
    log: Path | None, command: str, models: Sequence[str], options: Mapping[str, Json]
) -> Iterator[tuple[Display, Callable[[Printed], None]]]:
    """Show the progress of a long command that is not a job, and log it for programs, in a `with` block.

    Yields the display, and a function that takes the result.

    Args:
        log: `--log-json`, if it was given.
        command: its name.
        models: that it reads.
        options: with their defaults.

    Raises:
        UsageError: nothing can be written to the log.
    """
    events = None if log is None else EventLog(log, *map(Path, models))
    with logged(events) as ended:
        if events is not None:
            started(events, {"command": command, "input": list(models)}, options)
        yield Display(events), ended
