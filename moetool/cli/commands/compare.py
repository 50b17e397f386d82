"""Command line of `moetool compare`: parses options, runs the comparison, and prints its rows and tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from moetool.checkpoint.files import storage_errors
from moetool.checkpoint.sizes import as_read_from, format_bytes
from moetool.cli import next_step
from moetool.cli.display import AsJson, LogJson, print_json, print_table, watched
from moetool.cli.generate import build_options, builder
from moetool.compare.candidates import Candidate, candidates
from moetool.compare.options import CompareOptions
from moetool.compare.picture import plot_compared
from moetool.compare.results import Compared, ComparedModel, SharedStatistics, kind_of_text
from moetool.compare.running import compare
from moetool.errors import UsageError
from moetool.job.checks import output_file
from moetool.job.forecast import format_seconds
from moetool.measure.plots import pictured
from moetool.measure.results import NAT_UNIT, TextLoss, short_names, shown_excess, shown_kl

_MODEL = ("model", "asked", "saved", "size")
HEADERS = ("model", "asked", "saved", "size", "perplexity", "excess", "KL", "top-1", "time", "memory")
WORDS = (
    "excess: growth of the loss; KL: divergence from the original's predictions, 0 where these are identical. "
    "Lower is better."
)


@builder(CompareOptions)
def build(
    model: Annotated[str, typer.Argument(help="The original: a directory or a hub id.", show_default=False)],
    work: Annotated[Path, typer.Option(help="Where models are made and rows noted.")] = Path("compare"),
    keep: Annotated[bool, typer.Option("--keep", help="Leave the models there.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the table to FILE.md.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it: FILE.svg, .png or .pdf.")] = None,
    json: AsJson = False,
    log_json: LogJson = None,
    **typed: object,
) -> None:
    """Run `moetool compare` with the options that were typed."""
    options = build_options(CompareOptions, typed)
    wanted = candidates(options, build_options)
    table = None if output is None else output_file(output)
    with watched(log_json, "compare", [model, *options.models], options.model_dump(mode="json")) as (display, ended):

        def run() -> Compared:
            display.log("  ".join(HEADERS))
            return compare(
                model, options, wanted, work, keep=keep, progress=display, seen=lambda row: display.log(line(row))
            )

        result = pictured(plot, run, plot_compared)
        ended(result)
    if table is not None:
        with storage_errors(table):
            table.write_text(markdown(result), encoding="utf-8")
    if json:
        print_json(result.to_json())
        return refuse_empty(result)
    print(headline(result))
    for table_of in tables(result):
        print_table(table_of.headers, table_of.rows, title=table_of.title)
    if tables(result):
        print(WORDS)
    for row in result.rows:
        if row.error is not None:
            print(line(row))
    for shared in result.statistics:
        print(shared_line(shared))
    refuse_empty(result)
    next_step.tell(next_step.line(*best(result, wanted)))


def refuse_empty(result: Compared) -> None:
    """Raise `UsageError` if there is nothing to compare with the original, as each row says why."""
    if all(row.error is not None for row in result.rows):
        raise UsageError("None of these models could be made or read, each for the reason above.")


def best(result: Compared, wanted: Sequence[Candidate]) -> list[str]:
    """The arguments that make the row of least KL divergence at the largest ratio; without such a row, those
    that report the last model of the table."""
    made = {(row.name, row.asked): row.kl for row in result.rows if row.kl is not None and row.method is not None}
    found = [each for each in wanted if (each.name, each.asked) in made]
    if not found:
        return ["report", (result.rows[-1].path if result.rows else None) or result.model]
    chosen = min(found, key=lambda each: (-(each.asked or 0), made[each.name, each.asked] or 0))
    ratio = "" if chosen.asked is None else f"-{100 * chosen.asked:g}"
    words = ["compress", result.model, next_step.here(result.model, f"{chosen.name}{ratio}")]
    words += ["--method", chosen.kind.name]
    fields = type(chosen.options).model_fields
    for name, value in chosen.options:
        if value is not None and (fields[name].is_required() or value != fields[name].default):
            words += _option(f"--{name.replace('_', '-')}", value)
    return words


def _option(flag: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


class ComparedTable(NamedTuple):
    """A table of the comparison; its title says the unit of losses."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


def headline(result: Compared) -> str:
    """Line above the tables: the original's size, and its perplexity on each text."""
    named = zip(short_names([text.name for text in result.texts]), result.texts, strict=True)
    several = len(result.texts) > 1
    said = [f"{text.perplexity:.4f} on {name} ({text.windows:,} windows)" for name, text in named] if several else []
    on = "; ".join(said) or f"{result.perplexity:.4f} on {result.data} ({result.windows:,} windows)"
    size = f"{format_bytes(result.bytes)}{as_read_from(result.gguf_bytes)}"
    return f"{result.model}: {size}, windows of {result.sequence_length} tokens, perplexity {on}"


def tables(result: Compared) -> list[ComparedTable]:
    """The table of one text; of several one of the KL divergence on each, and one of what else was measured there. None
    where nothing was made."""
    rows = [row for row in result.rows if row.error is None]
    if not rows:
        return []
    if len(result.texts) < 2:
        return [ComparedTable(f"Excess loss and KL divergence in {NAT_UNIT}", HEADERS, [cells(row) for row in rows])]
    names = short_names([text.name for text in result.texts])
    kinds = [kind_of_text(result, number) for number in range(len(names))]
    columns = [f"{name} ({kind})" if kind else name for name, kind in zip(names, kinds, strict=True)]
    return [
        ComparedTable(
            f"KL divergence from the original on each text, in {NAT_UNIT}",
            (*_MODEL, *columns, "mean", "worst", "time", "memory"),
            [(*cells(row)[: len(_MODEL)], *_divergences(row), *cells(row)[-2:]) for row in rows],
        ),
        ComparedTable(
            f"Excess loss on each text, in {NAT_UNIT}, and top-1 agreement",
            ("model", "asked", *columns),
            [(*cells(row)[:2], *map(_excess_and_agreement, row.texts)) for row in rows],
        ),
    ]


def _divergences(row: ComparedModel) -> list[str]:
    found = [text.against.kl for text in row.texts if text.against is not None]
    over = row.over_texts
    found += [] if over is None else [over.kl_mean, over.kl_worst]
    return [shown_kl(kl) for kl in found]


def _excess_and_agreement(text: TextLoss) -> str:
    if (lost := text.against) is None:
        return ""
    return f"{shown_excess(lost.excess, lost.excess_error)}, {lost.agreement:.2%}"


def cells(row: ComparedModel) -> tuple[str, ...]:
    """Cells of one row of the table, formatted: on all texts together."""
    return (
        row.name,
        "" if row.asked is None else f"{row.asked:.1%}",
        "" if row.saved is None else f"{row.saved:.2%}",
        "" if row.bytes is None else format_bytes(row.bytes),
        "" if row.perplexity is None else f"{row.perplexity:.3f}",
        "" if row.excess is None else shown_excess(row.excess, row.excess_error),
        "" if row.kl is None else shown_kl(row.kl),
        "" if row.agreement is None else f"{row.agreement:.2%}",
        "" if row.seconds is None else format_seconds(row.seconds),
        "" if row.peak_memory_bytes is None else format_bytes(row.peak_memory_bytes),
    )


def line(row: ComparedModel) -> str:
    """Format a row of the comparison as one line of text, or the error that it ended with."""
    if row.error is not None:
        return f"{row.label}: {row.error}"
    return "  ".join(cell or "–" for cell in cells(row))


def shared_line(shared: SharedStatistics) -> str:
    """Line that says which rows shared one statistics pass, and its time."""
    took = "" if shared.seconds is None else f" {format_seconds(shared.seconds)}, in none of their times"
    return f"One statistics pass shared by {', '.join(shared.rows)}:{took}".removesuffix(":")


def markdown(result: Compared) -> str:
    """Format the whole comparison as a Markdown page with its tables and notes."""
    parts = [headline(result)]
    for table in tables(result):
        rows: list[Sequence[str]] = [table.headers, ["---", *["---:"] * (len(table.headers) - 1)], *table.rows]
        parts.append(f"{table.title}:")
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    parts += [WORDS] if tables(result) else []
    notes = [f"- {line(row)}" for row in result.rows if row.error is not None]
    notes += [f"- {shared_line(shared)}" for shared in result.statistics]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])]) + "\n"
