"""`moetool inspect`."""

from collections import Counter
from typing import Annotated, Any

import typer

from moetool.cli.app import COMMANDS
from moetool.cli.display import print_fields, print_json, print_table
from moetool.cli.generate import make_command
from moetool.pipeline.inspection import inspect_checkpoint
from moetool.pipeline.sizes import format_bytes, format_change


def build(name: str, arguments: list[str]) -> Any:
    """The command."""

    def command(
        model: Annotated[str, typer.Argument(help="A checkpoint, compressed or not.", show_default=False)],
        json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
    ) -> None:
        result = inspect_checkpoint(model)
        if json:
            print_json(result)
        else:
            _print(result)

    return make_command(name, command, COMMANDS[name][1])


def _print(result: dict[str, Any]) -> None:
    counts = result["parameters"]
    files = "in 1 file" if result["files"] == 1 else f"in {result['files']} files"
    if not result["files"]:
        files = "by config.json alone: there are no weight files"
    change = f", {format_change(result['ratio'])}" if result["ratio"] else ""
    print_fields(
        [
            ("model", result["path"]),
            ("architecture", f"{result['architecture']} ({result['router_rule']})"),
            ("layers", f"{result['layers']}, of which {result['moe_layers']} with experts"),
            ("experts", f"{result['experts']}, top-{result['top_k']}, {result['dtype']}"),
            ("width", f"hidden {result['hidden_size']}, intermediate {result['intermediate_size']}"),
            ("parameters", f"{counts['total']:,} total, {counts['active']:,} active, {counts['stored']:,} stored"),
            ("bytes", f"{format_bytes(result['bytes'])} {files}{change}"),
        ]
    )
    if all(layer["representation"] == "native" for layer in result["moe"]):
        return
    rows = [
        (str(layer["layer"]), *(_weights(layer.get(role, "native")) for role in ("gate", "up", "down")), _base(layer))
        for layer in result["moe"]
    ]
    print_table(("layer", "gate ranks", "up ranks", "down ranks", "base channels"), rows)


def _weights(specs: str | list[str]) -> str:
    """`12 … 96, mean 40; 1 dense` for a role's experts."""
    if isinstance(specs, str):
        return specs
    ranks = [int(spec.split(":")[1]) for spec in specs if spec.startswith("low-rank:")]
    others = Counter(spec for spec in specs if not spec.startswith("low-rank:"))
    parts = [f"{min(ranks)} … {max(ranks)}, mean {sum(ranks) / len(ranks):.0f}"] if ranks else []
    return "; ".join(parts + [f"{count} {spec}" for spec, count in others.items()])


def _base(layer: dict[str, Any]) -> str:
    if "base_channels" not in layer:
        return "-"
    return f"{layer['base_channels']}" + (f" (−{layer['dynamic_channels']})" if layer["dynamic_channels"] else "")
