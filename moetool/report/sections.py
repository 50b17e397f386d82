"""The headline of a report's page, and its sections on how the model was made and on its bytes."""

import shlex
from collections.abc import Iterator, Sequence

from moetool.checkpoint.sizes import as_read_from, format_bytes, format_change
from moetool.measure.results import NAT_UNIT, short_names, shown_kl
from moetool.report.charts import Bars
from moetool.report.parts import CodeBlock, PageTable, Section, count, plain
from moetool.report.quality import best_evaluation
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
            yield "top-1 agreement", f"{found.against.agreement:.1%}", f"KL {shown_kl(found.against.kl)} {NAT_UNIT}"
        if found.over_texts is not None:
            worst = f"{NAT_UNIT} on {short_names([found.over_texts.worst_text])[0]}"
            yield "KL on the worst text", shown_kl(found.over_texts.kl_worst), worst
    elif report.made is not None:
        yield "quality", "not measured", "eval --data TEXT --against ORIGINAL measures it for this page"


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
