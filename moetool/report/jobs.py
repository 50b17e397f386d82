"""Sections of a report on the jobs that made the model: time, memory and scratch, and the curves of trainings."""

from collections.abc import Iterator, Mapping, Sequence

from moetool.checkpoint.sizes import format_bytes
from moetool.job.forecast import format_seconds
from moetool.measure.results import NAT_UNIT
from moetool.report.charts import Bars, Chart, Lines, begun
from moetool.report.parts import PageTable, Section, number
from moetool.report.recorded import RecordedRun
from moetool.report.results import Report

_JOURNAL = 0.1  # MB of scratch that a journal may take
_JOBS = ("stage", "output", "runs", "time", "expected", "peak memory", "expected", "scratch", "expected")
_PHASES = ("phase", "seconds", "expected", "peak memory", "scratch")
_LOSSES = ("loss", "eval_loss")  # of a training


def time_and_memory(report: Report) -> Section | None:
    """Section of time, peak memory and scratch of the jobs that made the model."""
    if not (runs := report.runs):
        return None
    tables = [PageTable(title="Jobs", headers=_JOBS, rows=[_job(run) for run in runs], words=2)]
    phases = [(run, phase) for run in runs for phase in run.phases]
    charts = []
    if phases:
        rows = [row for run in runs for row in _phases(run)]
        tables.append(PageTable(title="Phases", headers=("stage", *_PHASES), rows=rows, words=2))
        names = [begun(f"{run.stage}: {phase.name}" if len(runs) > 1 else phase.name) for run, phase in phases]
        seconds: dict[str, Sequence[float | None]] = {"took": [phase.seconds for _, phase in phases]}
        if any(phase.expected_seconds is not None for _, phase in phases):
            seconds["expected"] = [phase.expected_seconds for _, phase in phases]
        charts.append(_by_phase("Time by phase", names, seconds, "seconds"))
        memory = [_megabytes(phase.peak_memory_bytes) for _, phase in phases]
        scratch = [_megabytes(phase.scratch_bytes) for _, phase in phases]
        if any(value is not None for value in memory):
            charts.append(_by_phase("Peak memory by phase", names, {"peak memory": memory}, "MB"))
        if any(value is not None and value > _JOURNAL for value in scratch):
            charts.append(_by_phase("Scratch by phase", names, {"scratch": scratch}, "MB"))
    notes = ["Expected: as --dry-run told. Scratch: unfinished work on the disk, gone at the end."]
    if any(run.runs > 1 for run in runs):
        notes.append("A job that was gone on with counts all its runs, what had to be done twice included.")
    return Section(name="jobs", title="Time, memory and scratch", charts=charts, tables=tables, notes=notes)


def _job(run: RecordedRun) -> tuple[str, ...]:
    told = run.expected
    return (
        run.stage,
        run.output,
        str(run.runs),
        format_seconds(run.seconds),
        "–" if told is None or told.seconds is None else format_seconds(told.seconds),
        format_bytes(run.peak_memory_bytes),
        _bytes(None if told is None else told.peak_memory_bytes),
        _bytes(run.scratch_bytes),
        _bytes(None if told is None else told.scratch_bytes),
    )


def _phases(run: RecordedRun) -> Iterator[tuple[str, ...]]:
    """A row for each phase of a job, and one for what it did beside them: libraries, headers, checks."""
    for phase in run.phases:
        expected = "–" if phase.expected_seconds is None else f"{phase.expected_seconds:.1f}"
        memory, scratch = _bytes(phase.peak_memory_bytes), _bytes(phase.scratch_bytes)
        yield run.stage, phase.name, f"{phase.seconds:.1f}", expected, memory, scratch
    if run.phases:
        rest = run.seconds - sum(phase.seconds for phase in run.phases)
        yield run.stage, "the rest", f"{max(rest, 0):.1f}", "–", "–", "–"


def _by_phase(title: str, names: Sequence[str], series: Mapping[str, Sequence[float | None]], axis: str) -> Chart:
    return Bars(title=title, labels=names, series=series, label_axis="phase", axis=axis, lying=True)


def _megabytes(count: int | None) -> float | None:
    return None if count is None else count / 1e6


def _bytes(count: int | None) -> str:
    return "–" if count is None else format_bytes(count)


def training(report: Report) -> Section | None:
    """Section with the loss curves that `tune` has recorded in the manifest; `None` without any."""
    runs = [run for run in report.runs if run.curve]
    if not runs:
        return None
    charts, tables = [], []
    for run in runs:
        points = _shown(run.curve)
        charts += list(curves(points))
        names = list(dict.fromkeys(name for point in points for name in point))
        rows = [tuple(number(point.get(name)) for name in names) for point in points]
        tables.append(
            PageTable(title=f"Training: {run.output}", headers=[name.replace("_", " ") for name in names], rows=rows)
        )
    return Section(name="training", title="Training", charts=charts, tables=tables)


def _shown(curve: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """A curve with KL divergences in `NAT_UNIT`: all of a repair's, which has no loss, or those from a teacher."""
    is_repair = not any(name in point for point in curve for name in _LOSSES)

    def shown(name: str, value: float) -> tuple[str, float]:
        is_divergence = name == "teacher_kl" or (is_repair and name != "step")
        return (f"{name}, {NAT_UNIT}", 1000 * value) if is_divergence else (name, value)

    return [dict(shown(name, value) for name, value in point.items()) for point in curve]


def curves(points: Sequence[Mapping[str, float]]) -> Iterator[Chart]:
    """One chart for losses, and one for each of the rest that changes."""

    def lines(title: str, names: Sequence[str], axis: str) -> Lines:
        kept = [point for point in points if any(name in point for name in names)]
        series = {name.replace("_", " "): [point.get(name) for point in kept] for name in names}
        return Lines(title=title, at=[point["step"] for point in kept], series=series, at_axis="step", axis=axis)

    there = dict.fromkeys(name for point in points for name in point if name != "step")
    losses = [name for name in _LOSSES if name in there]
    if losses:
        yield lines("Loss", losses, "nats per token")
    for name in there:
        values = {point[name] for point in points if name in point}
        if name not in losses and len(values) > 1:
            yield lines(name.replace("_", " ").capitalize(), [name], name.replace("_", " "))
