"""Sections of a report's page; a section that a model has no data for is left out."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moetool.checkpoint.sizes import as_read_from, format_bytes, format_change
from moetool.job.forecast import format_seconds
from moetool.measure.results import OWN_KIND_ALONE, Evaluation, TextLoss, kind_in_words, short_names, shown_kl
from moetool.report.charts import LONGEST, Bars, Chart, Lines
from moetool.report.parts import CodeBlock, PageTable, Section, count, number, plain
from moetool.report.recorded import RecordedRun
from moetool.report.results import HowMade, Report


def headline(report: Report) -> Iterator[tuple[str, str, str]]:
    """The numbers that come first: what, how much, and what that is beside something else."""
    files = "1 file" if report.files == 1 else f"{report.files} files"
    inspection, found = report.inspection, best_evaluation(report)
    change = f"{format_change(inspection.files.ratio)}" if inspection and inspection.files.ratio else files
    if report.gguf_bytes is None:
        yield "size", format_bytes(report.bytes), change
    else:
        yield "size", format_bytes(report.gguf_bytes), f"in GGUF, read as {format_bytes(report.bytes)}"
    if inspection is not None:
        counts = inspection.parameters
        yield "parameters", count(counts.total), f"{count(counts.active)} per token"
        yield "experts", str(inspection.experts), f"{inspection.top_k} per token, {inspection.moe_layers} layers"
    else:
        yield "parameters", count(report.numbers), "as stored"
    if found is not None:
        beside = "" if found.against is None else f"the original's: {found.against.perplexity:.2f}"
        yield found.protocol, f"{found.perplexity:.2f}", beside
        if found.against is not None:
            yield "top-1 agreement", f"{found.against.agreement:.1%}", f"KL {shown_kl(found.against.kl):.4f} nats"
        if found.over_texts is not None:
            worst = f"nats on {short_names([found.over_texts.worst_text])[0]}"
            yield "KL on the worst text", f"{shown_kl(found.over_texts.kl_worst):.4f}", worst
    elif report.made is not None:
        yield "quality", "not measured", "report with --data TEXT --against ORIGINAL adds it"


def best_evaluation(report: Report) -> Evaluation | None:
    """The evaluation measured now, or else the last one recorded of this model; `None` if there is neither."""
    if report.evaluation is not None or report.recorded is None:
        return report.evaluation
    place = Path(report.model).resolve()
    own = [found for found in report.recorded.evaluations if Path(found.model).resolve() == place]
    return own[-1] if own else None


def how_made(made: HowMade) -> Section:
    """Section that names sources, stages and the command that makes the model again."""
    commands = [*(step.command for step in made.steps[:-1]), made.command]
    text = "\n".join(_continued(command) for command in commands if command is not None)
    code = [CodeBlock(title="To make it again", text=text)] if text else []
    if made.preset is not None:
        code.append(CodeBlock(title="preset.yaml", text=made.preset))
    steps = [(str(number), step.stage, step.source) for number, step in enumerate(made.steps, start=1)]
    tables = [PageTable(title="Steps, the first above", headers=("", "stage", "made from"), rows=steps, words=3)]
    if made.calibration is not None:
        rows = [(name.replace("_", " "), plain(value)) for name, value in made.calibration.items()]
        tables.append(PageTable(title="Calibration", headers=("", "value"), rows=rows))
    lead = f"Made by {made.steps[-1].stage} from {made.steps[-1].source}."
    notes = [f"Fingerprint of what it was made from: {made.steps[-1].source_fingerprint}."]
    if made.command is None:
        notes.append("This version of moetool does not know the stage or one of its options: no command to repeat it.")
    elif None in commands:
        notes.append("Commands of other steps are in the reports of what they made.")
    if any(step.command for step in made.steps):
        notes.append("In commands before the last, files have their names alone: say where they are.")
    return Section(name="made", title="How it was made", lead=lead, code=code, tables=tables, notes=notes)


def options(made: HowMade) -> Section:
    """Every option of the last step, and by which versions it was made."""
    rows = [(f"--{name.replace('_', '-')}", plain(value)) for name, value in made.options.items()]
    tables = [
        PageTable(title=f"Options of {made.steps[-1].stage}", headers=("option", "value"), rows=rows, words=2),
        PageTable(title="Versions", headers=("", "version"), rows=list(made.versions.items()), words=2),
    ]
    return Section(name="options", title="Options and versions", tables=tables)


def _continued(command: str) -> str:
    """A command line with every option on a line of its own, as a shell takes it."""
    lines = [""]
    for word in shlex.split(command):
        if word.startswith("--"):
            lines.append("")
        lines[-1] += f" {shlex.quote(word)}"
    return " \\\n   ".join(lines).strip()


def size(report: Report) -> Section:
    """Section with the bytes of the files, in total and by kind of tensor."""
    has_before = report.against is not None
    rows = [
        (
            each.kind,
            *([format_bytes(each.before or 0)] if has_before else []),
            format_bytes(each.bytes),
            f"{each.bytes / max(1, report.bytes):.1%}",
        )
        for each in report.weights
    ]
    headers = ("tensors", *(["before"] if has_before else []), "bytes", "share")
    series: dict[str, Sequence[float]] = {}
    if has_before:
        series["before"] = [(each.before or 0) / 1e6 for each in report.weights]
    series["now" if has_before else "bytes"] = [each.bytes / 1e6 for each in report.weights]
    chart = Bars(
        title="Bytes by kind of tensor",
        labels=[each.kind for each in report.weights],
        series=series,
        label_axis="kind of tensor",
        axis="MB",
        lying=True,
    )
    lead = f"{format_bytes(report.bytes)} of weight files{as_read_from(report.gguf_bytes)}"
    if report.inspection is not None and report.inspection.files.ratio:
        original = report.inspection.files
        lead += f", of {format_bytes(original.original_bytes)} before: {format_change(original.ratio)}"
    notes = ["The table counts tensors, the total whole files: the difference is the files' headers."]
    if report.against is not None and report.against_bytes is not None:
        read = as_read_from(report.against_gguf_bytes)
        notes.append(f"Before: {report.against}, {format_bytes(report.against_bytes)} of weight files{read}.")
    return Section(
        name="size",
        title="Size",
        lead=f"{lead}.",
        charts=[chart],
        tables=[PageTable(title="Bytes by kind of tensor", headers=headers, rows=rows)],
        notes=notes,
    )


def quality(report: Report) -> Section | None:
    """Section of perplexity, excess loss and KL divergence, beside the original's."""
    recorded = () if report.recorded is None else report.recorded.evaluations
    every = [*([] if report.evaluation is None else [report.evaluation]), *recorded]
    tables = []
    if every:
        headers = ("model", "perplexity", "original's", "excess, nats", "KL, nats", "top-1 agreement", "text")
        tables.append(PageTable(title="Perplexity", headers=headers, rows=[_evaluated(found) for found in every]))
    best = best_evaluation(report)
    charts = []
    if best is not None and len(best.texts) > 1:
        tables.append(_text_by_text(best))
        if best.against is not None:
            charts.append(_divergences(best))
    losses = [*_proofs(report)]
    if losses:
        tables.append(
            PageTable(
                title="Proof of the conversion, nats per token",
                headers=("stage", "loss of the dense model", "of the result", "with the experts kept"),
                rows=losses,
            )
        )
    if not tables:
        return None
    notes = ["Excess: the model's loss less the original's, ± its standard error. KL: from the original, in nats."]
    notes += [] if best is None else _of_kinds(best)
    return Section(name="quality", title="Quality", charts=charts, tables=tables, notes=notes if every else [])


def _text_by_text(found: Evaluation) -> PageTable:
    """Losses on each of several texts, and whether calibration had text of its kind."""
    headers = (
        "text",
        "calibration",
        "windows",
        "perplexity",
        "original's",
        "excess, nats",
        "KL, nats",
        "top-1 agreement",
    )
    rows = [
        (name, kind_in_words(text.own_kind) or "–", f"{text.windows:,}", *_losses(text)) for name, text in _named(found)
    ]
    return PageTable(title="Text by text", headers=headers, rows=rows, words=2)


def _divergences(found: Evaluation) -> Chart:
    """KL divergence on each text; those of the calibration's own kind beside the others."""
    series: dict[str, Sequence[float | None]] = {}
    for label, own in (("calibration's own kind", True), ("other kinds", False), ("KL", None)):
        lost = [text.against.kl if text.against and text.own_kind is own else None for text in found.texts]
        if any(value is not None for value in lost):
            series[label] = lost
    labels = [_label(name) for name, _ in _named(found)]
    return Bars(
        title="KL divergence by text",
        labels=labels,
        series=series,
        label_axis="text",
        axis="nats per token",
        lying=True,
    )


def _named(found: Evaluation) -> Iterator[tuple[str, TextLoss]]:
    return zip(short_names([text.name for text in found.texts]), found.texts, strict=True)


def _of_kinds(found: Evaluation) -> Iterator[str]:
    """What to know of texts that calibration had, and had not."""
    if not found.calibration:
        return
    named = ", ".join(short_names(found.calibration))
    yield f"Calibrated on {named}. Own kind: that text or another split of it, by name."
    over = found.over_texts
    if over is not None and over.abroad is not None:
        yield f"KL on text of other kinds is at worst {over.abroad:.1f} times what it is on the calibration's own kind."
    elif found.against is not None and all(text.own_kind for text in found.texts):
        yield f"{OWN_KIND_ALONE[0].upper()}{OWN_KIND_ALONE[1:]}."


def _evaluated(found: Evaluation) -> tuple[str, ...]:
    text = f"{found.data} ({found.windows} × {found.sequence_length} tokens)"
    return Path(found.model).name, *_losses(found), text


def _losses(found: Evaluation | TextLoss) -> tuple[str, ...]:
    """Perplexity of the model and of the original, excess loss, KL divergence, agreement."""
    if (beside := found.against) is None:
        return f"{found.perplexity:.4f}", "–", "–", "–", "–"
    error = "" if beside.excess_error is None else f"\u00a0±\u00a0{beside.excess_error:.4f}"
    return (
        f"{found.perplexity:.4f}",
        f"{beside.perplexity:.4f}",
        f"{beside.excess:.4f}{error}",
        f"{shown_kl(beside.kl):.4f}",
        f"{beside.agreement:.2%}",
    )


def _proofs(report: Report) -> Iterator[tuple[str, ...]]:
    for run in report.runs:
        if run.proof is not None and run.proof.loss_dense is not None:
            yield run.stage, *map(number, (run.proof.loss_dense, run.proof.loss_mixture, run.proof.loss_kept))


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
        names = [_label(f"{run.stage}: {phase.name}" if len(runs) > 1 else phase.name) for run, phase in phases]
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


_JOURNAL = 0.1  # MB of scratch that a journal may take
_JOBS = ("stage", "output", "runs", "time", "expected", "peak memory", "expected", "scratch", "expected")
_PHASES = ("phase", "seconds", "expected", "peak memory", "scratch")


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


def _label(name: str) -> str:
    """As long as it may stand beside a chart; not its end but its beginning tells it from others."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


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
        charts += list(curves(run.curve))
        names = list(dict.fromkeys(name for point in run.curve for name in point))
        rows = [tuple(number(point.get(name)) for name in names) for point in run.curve]
        tables.append(
            PageTable(title=f"Training: {run.output}", headers=[name.replace("_", " ") for name in names], rows=rows)
        )
    return Section(name="training", title="Training", charts=charts, tables=tables)


def curves(points: Sequence[Mapping[str, float]]) -> Iterator[Chart]:
    """One chart for losses, and one for each of the rest that changes."""

    def lines(title: str, names: Sequence[str], axis: str) -> Lines:
        kept = [point for point in points if any(name in point for name in names)]
        series = {name.replace("_", " "): [point.get(name) for point in kept] for name in names}
        return Lines(title=title, at=[point["step"] for point in kept], series=series, at_axis="step", axis=axis)

    there = dict.fromkeys(name for point in points for name in point if name != "step")
    losses = [name for name in ("loss", "eval_loss") if name in there]
    if losses:
        yield lines("Loss", losses, "nats per token")
    for name in there:
        values = {point[name] for point in points if name in point}
        if name not in losses and len(values) > 1:
            yield lines(name.replace("_", " ").capitalize(), [name], name.replace("_", " "))
