"""Writes docs/options.md and the table that the command line starts from: every option of every command.

python scripts/docs/options.py
"""

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from moetool.cli.app import FILE as TABLE
from moetool.cli.app import imported
from moetool.cli.choosing import CHOICES, in_order
from moetool.cli.command import to_record
from moetool.cli.names import commands
from moetool.stages import stages

FILE = Path(__file__).parents[2] / "docs" / "options.md"
HEADER = """# Options

Every option of every command. This page is generated from the commands (`make docs`); a test compares it with them.
`moetool COMMAND --help` shows the same, and with `--method NAME` the options of that method. In a preset
(`--preset FILE.yaml`) an option is written with `_` for `-` and without the dashes. A share is
written `0.4` or `40%`, a size `20GB` or `16GiB`. An option that takes a list with commas may be given several times
instead; any other has one value, and two different ones are an error.
"""
COMMANDS = commands()
STAGES = [name for name, (module, _) in COMMANDS.items() if module == "stage"]

Row = tuple[str, str, str, str]


def rows(command: str, *arguments: str) -> list[Row]:
    """Name, values, default and meaning of all that a command takes, in its own order."""
    return [_row(parameter) for parameter in imported(command, arguments).params]


def _row(parameter: Any) -> Row:
    names = parameter.opts if parameter.param_type_name == "option" else [parameter.name.upper()]
    shown = ", ".join(f"`{name}`" for name in (*names, *parameter.secondary_opts))
    text, default = parameter.help or "", ""
    if said := re.search(r" \[default: ([^\]]*)\]", text):
        default = said[1]
    elif text.endswith(" [required]"):
        default = "required"
    elif parameter.default not in (None, False):
        default = str(parameter.default)
    elif getattr(parameter, "required", False):
        default = "required"
    text = re.sub(r" \[(default: [^\]]*|required)\]| One of: [^.]*\.$", "", text)
    return shown, _values(parameter), default, text.replace("|", "\\|")


def _values(parameter: Any) -> str:
    # Typer has had types of its own since it does without click.
    described = getattr(parameter, "type_descriptor", None)
    kind = parameter.type if described is None else described.annotation
    choices = get_args(kind) if get_origin(kind) is Literal else getattr(kind, "choices", ())
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    if getattr(parameter, "is_flag", False):
        return "a switch"
    if (parameter.metavar or "").startswith("<"):
        return str(parameter.metavar).strip("<>")
    return {int: "whole number", float: "number"}.get(kind, {"integer": "whole number", "float": "number"}.get(
        getattr(kind, "name", ""), ""))  # fmt: skip


def front_table() -> str:
    """What `moetool.cli.app` reads: parameters, each once, and those of every form of every command."""
    from moetool.upcycle.targets import targets

    parameters: dict[str, int] = {}
    forms: dict[str, dict[str, list[int]]] = {}
    for command in COMMANDS:
        choice = CHOICES[command][0] if command in CHOICES else None
        methods = in_order(command, _methods_of(command)) if choice else [""]
        for method in methods:
            own = [to_record(one) for one in imported(command, [f"--{choice}", method] if choice else []).parameters]
            for record in own:
                if record["name"] == choice:
                    del record["default"]  # which is what was typed
            lines = [json.dumps(record, ensure_ascii=False) for record in own]
            forms.setdefault(command, {})[method] = [parameters.setdefault(line, len(parameters)) for line in lines]
    names = {"target": ["auto", *targets()], "methods": in_order("compress", _methods_of("compress"))}
    listed = ",\n".join(parameters)
    summaries = {name: kind.summary for name, kind in stages().items() if kind.method_of in CHOICES}
    head = "".join(
        f'"{key}": {json.dumps(own)},\n' for key, own in (("names", names), ("summaries", summaries), ("forms", forms))
    )
    return f'{{{head}"parameters": [\n{listed}\n]}}\n'


def _methods_of(command: str) -> list[str]:
    return [name for name, kind in stages().items() if kind.method_of == command]


def table(content: list[Row], places: list[str] | None = None) -> list[str]:
    """The same as Markdown, with a last column that says where each exists if not everywhere."""
    header = ["option", "values", "default", "", *(["only with"] if places is not None else [])]
    full = [(*row, *more) for row, *more in zip(content, *([places] if places is not None else []), strict=True)]
    return [*(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *full)), ""]


def text() -> str:
    """The whole page."""
    lines = [HEADER]
    everywhere = [row for row in rows("decompose") if all(row in rows(name) for name in STAGES)]
    lines += ["## Every command that writes a checkpoint", "", f"{', '.join(f'`{name}`' for name in STAGES)}:", ""]
    lines += table(everywhere)
    for command, (module, summary) in COMMANDS.items():
        lines += [f"## {command}", "", summary, ""]
        known = everywhere if module == "stage" else []
        lines += _forms(command, known) if command in CHOICES else table([r for r in rows(command) if r not in known])
        if command == "upcycle":
            lines += _sources()
    return "\n".join(lines).rstrip() + "\n"


def _forms(command: str, known: list[Row]) -> list[str]:
    """A command whose options depend on its method."""
    choice, default = CHOICES[command]
    methods = {name: stages()[name] for name in in_order(command, _methods_of(command))}
    lines = [f"| `--{choice}` | |", "|---|---|"]
    lines += [f"| `{name}`{' (default)' * (name == default)} | {kind.summary} |" for name, kind in methods.items()]
    found: dict[Row, list[str]] = {}
    for name in methods:
        for row in rows(command, f"--{choice}", name):
            if row not in known and row[0] != f"`--{choice}`":
                found.setdefault(row, []).append(name)
    # What all have comes first; then by the first method that has it.
    ordered = sorted(found, key=lambda row: len(found[row]) < len(methods))
    return [*lines, "", *table(ordered, [_place(found[row], list(methods)) for row in ordered])]


def _place(those: list[str], methods: list[str]) -> str:
    others = [name for name in methods if name not in those]
    shorter = f"all but {', '.join(others)}" if others else ""
    return shorter if len(others) < len(those) else ", ".join(those)


def _sources() -> list[str]:
    from moetool.upcycle.methods.branch_train_mix import ExpertSource

    content = [
        (
            _with_aliases(name, field),
            "",
            "required" if field.is_required() else str(field.default or ""),
            field.description or "",
        )
        for name, field in ExpertSource.model_fields.items()
    ]
    return ["Each entry of `sources`, in a preset:", "", *table(content)]


def _with_aliases(name: str, field: FieldInfo) -> str:
    aliases = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [name]
    return ", ".join(f"`{alias}`" for alias in aliases)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    TABLE.write_text(front_table(), encoding="utf-8")
