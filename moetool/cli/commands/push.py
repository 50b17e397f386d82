"""Command line of `moetool push`: uploads a checkpoint to the Hugging Face hub."""

from typing import Annotated

import typer

from moetool.checkpoint.sizes import format_bytes
from moetool.cli import next_step
from moetool.cli.display import AsJson, Display, print_fields, print_json, print_table
from moetool.cli.generate import builder
from moetool.export.hub import push


@builder()
def build(
    model: Annotated[str, typer.Argument(help="A checkpoint's directory.", show_default=False)],
    repo: Annotated[str, typer.Argument(help="On the hub: owner/name.", show_default=False)],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public, not private.")] = False,
    revision: Annotated[str | None, typer.Option(help="A branch that is there [default: main].")] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be uploaded.")] = False,
    json: AsJson = False,
) -> None:
    """Run `moetool push`, or list the files with `--dry-run`."""
    result = push(model, repo, public=public, revision=revision, message=message, dry_run=dry_run, progress=Display())
    if json:
        print_json(result.to_json())
        return
    if dry_run:
        print_table(("file", "size"), [(file.name, format_bytes(file.bytes)) for file in result.files])
    print_fields(
        [
            ("repository", result.url or f"{repo} (nothing was uploaded)"),
            ("files", f"{len(result.files)}, {format_bytes(result.bytes)}"),
            *(("note", note) for note in result.notes),
        ]
    )
    if dry_run:
        settings = {"--revision": revision, "--message": message}
        more = [word for option, value in settings.items() if value is not None for word in (option, value)]
        next_step.tell(next_step.line("push", model, repo, *(["--public"] if public else []), *more))
    else:
        next_step.tell(next_step.line("inspect", repo))
