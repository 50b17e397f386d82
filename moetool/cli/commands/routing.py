"""Command line of `moetool routing`: compares which experts different texts are routed to."""

from pathlib import Path
from typing import Annotated

import typer

from moetool.cli import next_step
from moetool.cli.display import AsJson, LogJson, print_fields, print_json, print_table, watched
from moetool.cli.generate import build_options, builder
from moetool.measure.plots import pictured, plot_routing
from moetool.measure.results import Matrix
from moetool.measure.routing import RoutingOptions, routing
from moetool.runtime.modules.batch_dependence import BATCH_DEPENDENT

_MOST = 16  # experts that fit beside one another


@builder(RoutingOptions)
def build(
    model: Annotated[str, typer.Argument(help="An MoE model of any kind.", show_default=False)],
    plot: Annotated[Path | None, typer.Option(help="Draw it too: FILE.png, .svg or .pdf.")] = None,
    json: AsJson = False,
    log_json: LogJson = None,
    **typed: object,
) -> None:
    """Run `moetool routing` on an MoE model and several texts."""
    options = build_options(RoutingOptions, typed)
    with watched(log_json, "routing", [model], options.model_dump(mode="json")) as (display, ended):
        result = pictured(plot, lambda: routing(model, options, display), plot_routing)
        ended(result)
    if json:
        print_json(result.to_json())
        return
    print_fields([("model", model), *([("note", BATCH_DEPENDENT)] if result.depends_on_batch else ())])
    shares = [_mean(text.shares) for text in result.data]
    experts = len(shares[0])
    if experts <= _MOST:
        rows = [(text.name, *(f"{share:.1%}" for share in row)) for text, row in zip(result.data, shares, strict=True)]
        print_table(("text", *map(str, range(experts))), rows, title="Share per expert, mean over the layers")
    else:
        rows = [
            (text.name, f"{min(row):.2%}", f"{max(row):.2%}") for text, row in zip(result.data, shares, strict=True)
        ]
        print_table(("text", "least", "largest"), rows, title=f"Share of {experts} experts, mean over the layers")
    if result.clustering is not None:
        rows = [
            (text.name, *(f"{value:.3f}" for value in row))
            for text, row in zip(result.data, result.clustering.distances, strict=True)
        ]
        header = ("text", *(str(number + 1) for number in range(len(rows))))
        print_table(header, rows, title="How far apart they are (0: the same choices, 1: none in common)")
    next_step.tell(next_step.line("inspect", model, "--analysis"))


def _mean(layers: Matrix) -> list[float]:
    """Each expert's share, `[layers][experts]` averaged over the layers."""
    return [sum(column) / len(column) for column in zip(*layers, strict=True)]
