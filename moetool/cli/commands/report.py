"""Command line of `moetool report`: writes the page on a model, or its numbers as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from moetool.checkpoint.sizes import format_bytes
from moetool.cli import next_step
from moetool.cli.display import LogJson, print_fields, print_json, watched
from moetool.cli.generate import build_options, builder
from moetool.report import pictures
from moetool.report.gathering import gather
from moetool.report.options import ReportOptions
from moetool.report.page import page_file, sections, write_page


@builder(ReportOptions)
def build(
    model: Annotated[str, typer.Argument(help="A checkpoint of any kind.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Argument(
            help="FILE.html to write, replaced if it exists [default: the model's name, here].", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The numbers behind it as one JSON object.")] = False,
    log_json: LogJson = None,
    **typed: object,
) -> None:
    """Run `moetool report` on a model and write its page."""
    options = build_options(ReportOptions, typed)
    file = page_file(model, output)
    with watched(log_json, "report", [model], options.model_dump(mode="json")) as (display, ended):
        if not pictures.is_there():
            display.log("matplotlib is not installed: the report will have no charts (pip install matplotlib).")
        if file.exists():
            display.log(f"{file} is there already: it is replaced.")
        result = gather(model, file, options, display)
        write_page(result, file, display)
        ended(result)
    if json:
        print_json(result.to_json())
        return
    titles = ", ".join(section.title for section in sections(result))
    print_fields(
        [("report", f"{file} ({format_bytes(file.stat().st_size)})"), ("sections", titles)]
        + [("note", note) for note in result.notes]
    )
    next_step.tell(next_step.after_page(file))
