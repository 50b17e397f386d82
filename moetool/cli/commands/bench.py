"""Command line of `moetool bench`: parses options, measures, and prints tables."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moetool.checkpoint.sizes import format_bytes
from moetool.cli import next_step
from moetool.cli.display import AsJson, LogJson, print_fields, print_json, print_table, watched
from moetool.cli.generate import build_options, builder
from moetool.measure.bench.benchmark import bench
from moetool.measure.bench.options import BenchOptions
from moetool.measure.bench.picture import plot_bench
from moetool.measure.bench.result import Benched, BenchResult, Case, CaseRatios, Ratios
from moetool.measure.plots import pictured

_PARAMETERS, _LOAD = "numbers in the files", "time to load"
_SIZES = {
    "weight files": "file_bytes",
    "parameters and buffers": "weight_bytes",
    "allocated once loaded": "anonymous_bytes",
    "most allocated while loading": "load_peak_bytes",
    "most allocated": "peak_bytes",
    "allocated and mapped once it has run": "unique_bytes",
    "on the card once loaded": "device_bytes",
    "most on the card": "device_peak_bytes",
}
_CARD = ("device_bytes", "device_peak_bytes")


def _speed(number: float) -> str:
    return f"{number:,.1f}"


def _count(number: float) -> str:
    """1234567 → `1.23 M`."""
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.2f} {unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.2f} P"


_HEADERS = {
    "prefill_tokens_per_second": "prefill, tokens/s",
    "decode_tokens_per_second": "decode, tokens/s",
    "tokens_per_second": "generate, tokens/s",
    "flops": "FLOPs",
    "flops_per_token": "FLOPs/new token",
    "bytes_per_token": "bytes/new token",
    "bandwidth_share": "of the bandwidth",
}
_MEASURES: dict[str, Callable[[float], str]] = {
    **dict.fromkeys(list(_HEADERS)[:3], _speed),
    **dict.fromkeys(list(_HEADERS)[3:5], _count),
    "bytes_per_token": format_bytes,
    "bandwidth_share": "{:.0%}".format,
}
_APART = 0.05  # natural logarithm, from which on a median of ratios and a ratio of medians are told side by side


@builder(BenchOptions)
def build(
    model: Annotated[str, typer.Argument(help="A checkpoint, compressed or not.", show_default=False)],
    plot: Annotated[Path | None, typer.Option(help="Draw it too: FILE.png, .svg or .pdf.")] = None,
    json: AsJson = False,
    log_json: LogJson = None,
    **typed: Any,
) -> None:
    """Run `moetool bench` on a model, and on another beside it with `--against`."""
    options = build_options(BenchOptions, typed)
    models = [model, *([] if options.against is None else [options.against])]
    with watched(log_json, "bench", models, options.model_dump(mode="json")) as (display, ended):
        result = pictured(plot, lambda: bench(model, options, display), plot_bench)
        ended(result)
    if json:
        print_json(result.to_json())
        return
    _print(result)
    next_step.tell(next_step.line("report", model))


def _print(result: BenchResult) -> None:
    models = [result.model, *([] if result.against is None else [result.against])]
    print_fields(
        [
            *zip(("model", "against"), map(_described, models), strict=False),
            ("device", f"{result.device}, {result.threads} thread{'s' if result.threads > 1 else ''}"),
            *_bandwidth(result),
            ("rounds", f"{result.rounds}, medians; {result.new_tokens} new tokens after every prompt"),
        ]
    )
    names = ("model", "against", "ratio") if result.ratios else ("model",)
    columns = [_sizes(own) for own in models] + ([_size_ratios(result.ratios)] if result.ratios else [])
    rows = [(label, *(column.get(label, "") for column in columns)) for label in columns[0]]
    print_table(("", *names), rows, title="Size and memory")
    lines = []
    for number, case in enumerate(result.model.cases):
        found = [_told(own.cases[number], _MEASURES) for own in models]
        found += [_told(result.ratios.cases[number], dict.fromkeys(_MEASURES, _ratio))] if result.ratios else []
        lines += [
            (str(case.batch), str(case.length), name, *row) for name, row in zip(names, found, strict=True) if any(row)
        ]
    header = [_HEADERS[name] for name in _MEASURES]
    print_table(("batch", "length", "", *header), lines, title="Speed, and what it takes")
    if result.against is not None and result.ratios is not None:
        print(explained_ratios(result.model.cases, result.against.cases, result.ratios.cases))


def _bandwidth(result: BenchResult) -> list[tuple[str, str]]:
    found = result.copy_bytes_per_second
    return (
        [] if found is None else [("copying", f"{format_bytes(round(found))} of memory per second, read and written")]
    )


def explained_ratios(model: Sequence[Case], original: Sequence[Case], ratios: Sequence[CaseRatios]) -> str:
    """Sentences that tell a median of ratios, which the table shows, from the ratio of the medians above it, and where
    the two are farthest apart if that is more than 5 %."""
    said = (
        "A ratio of speeds is the median over rounds, in each of which both models ran one after the other; it is not "
        "the ratio of the two medians above it."
    )
    found = [
        (
            f"{header.partition(',')[0]} of {case.batch} × {case.length} tokens",
            shown,
            getattr(one, name) / getattr(other, name),
        )
        for case, one, other in zip(ratios, model, original, strict=True)
        for name, header in list(_HEADERS.items())[:3]
        if (shown := getattr(case, name)) is not None
    ]
    where, shown, of_medians = max(found, key=lambda each: abs(math.log(each[1] / each[2])))
    if abs(math.log(shown / of_medians)) < _APART:
        return said
    return (
        f"{said} The two differ most in {where}: {_ratio(shown)} and {_ratio(of_medians)}. Some rounds were slowed by "
        "other work; more --rounds bring the two together."
    )


def _described(own: Benched) -> str:
    return f"{own.model} ({own.dtype}{', experts made dense' if own.synthesized else ''})"


def _sizes(own: Benched) -> dict[str, str]:
    """Rows of the table of sizes: label → formatted size."""
    held: dict[str, int] = vars(own.memory)
    sizes = {label: format_bytes(held[name]) for label, name in _SIZES.items() if held[name] or name not in _CARD}
    return {_PARAMETERS: _count(own.parameters), **sizes, _LOAD: f"{own.load_seconds:.2f} s"}


def _size_ratios(ratios: Ratios) -> dict[str, str]:
    held: dict[str, float | None] = vars(ratios)
    names = {_PARAMETERS: "parameters", **_SIZES, _LOAD: "load_seconds"}
    return {label: _ratio(found) for label, name in names.items() if (found := held.get(name)) is not None}


def _told(case: Case | CaseRatios, written: Mapping[str, Callable[[float], str]]) -> list[str]:
    """Every measure as it is written, nothing for what was not taken."""
    held: dict[str, float | None] = vars(case)
    return ["" if (value := held.get(name)) is None else write(value) for name, write in written.items()]


def _ratio(number: float) -> str:
    return f"{number:.3f}"
