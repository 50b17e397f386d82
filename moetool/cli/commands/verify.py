"""`moetool verify`."""

from typing import Annotated, Any

import typer

from moetool.cli.app import COMMANDS
from moetool.cli.display import Display, print_fields, print_json, print_table
from moetool.cli.generate import HintingCommand, make_command
from moetool.job.sizes import format_bytes
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
            print_json(result)
            return
        fields = [("model", model), ("tensors", f"{result['tensors']:,}, all finite, {format_bytes(result['bytes'])}")]
        if against is not None:
            fields.append(("against", f"{against}: {_compared(result)}"))
        fields += [("note", note) for note in result["notes"]]
        print_fields(fields)
        if "relative_error" in result:
            errors = result["relative_error"]
            rows = [(layer, *(f"{error:.3g}" for error in roles.values())) for layer, roles in errors.items()]
            print_table(("layer", *next(iter(errors.values()))), rows, title="‖W' − W‖ / ‖W‖")
        print("ok")

    return make_command(name, command, COMMANDS[name][1])


def _compared(result: dict[str, Any]) -> str:
    told = []
    if result["same_tensors"]:
        told.append("everything outside the experts is bit for bit the same")
    if result["stages"]:
        told.append(f"it was made from that by {', then '.join(reversed(result['stages']))}")
    return "; ".join(told) or "the same family and shape"
