"""`moetool verify`."""

from typing import Annotated

import typer

from moetool.checkpoint.sizes import format_bytes
from moetool.cli.app import COMMANDS
from moetool.cli.display import Display, print_fields, print_json, print_table
from moetool.cli.generate import HintingCommand, make_command
from moetool.measure.told import Comparison
from moetool.measure.verification import verify_checkpoint


def build(name: str, arguments: list[str]) -> HintingCommand:
    """The command."""

    def command(
        model: Annotated[str, typer.Argument(help="A checkpoint.", show_default=False)],
        against: Annotated[str | None, typer.Option(help="The checkpoint it was made from.")] = None,
        json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
    ) -> None:
        result = verify_checkpoint(model, against, Display())
        if json:
            print_json(result.to_json())
            return
        comparison = result.comparison
        fields = [("model", model), ("tensors", f"{result.tensors:,}, all finite, {format_bytes(result.bytes)}")]
        if comparison is not None:
            fields.append(("against", f"{comparison.against}: {_compared(comparison)}"))
        fields += [("note", note) for note in result.notes]
        print_fields(fields)
        if comparison is not None and (errors := comparison.relative_error) is not None:
            rows = [(str(layer), *(f"{error:.3g}" for error in roles.values())) for layer, roles in errors.items()]
            print_table(("layer", *next(iter(errors.values()))), rows, title="‖W' − W‖ / ‖W‖")
        print("ok")

    return make_command(name, command, COMMANDS[name][1])


def _compared(comparison: Comparison) -> str:
    told = []
    if comparison.same_tensors:
        told.append("everything outside the experts is bit for bit the same")
    if comparison.stages:
        told.append(f"it was made from that by {', then '.join(reversed(comparison.stages))}")
    return "; ".join(told) or "the same family and shape"
