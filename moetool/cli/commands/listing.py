"""Command line of `moetool list`: lists methods, architectures, presets, representations and more."""

from typing import Annotated, Literal

import typer

from moetool.architectures.dense import FEATURES, KNOWN_DENSE
from moetool.cli import next_step, presets
from moetool.cli.choosing import CHOICES, in_order
from moetool.cli.display import AsJson, print_json, print_table
from moetool.cli.generate import builder
from moetool.cli.names import commands

What = Literal["methods", "architectures", "dense-architectures", "targets", "presets", "representations"]

_NEXT = {
    "methods": ("compress", "--method", "hybrid", "--help"),
    "presets": ("compress", "--preset", "d2moe-40", "--help"),
    "targets": ("upcycle", "--help"),
}


@builder()
def build(
    what: Annotated[What, typer.Argument(help="What to list.")] = "methods",
    json: AsJson = False,
) -> None:
    """Run `moetool list` for one kind of thing."""
    rows = {
        "methods": _methods,
        "architectures": _architectures,
        "dense-architectures": _dense_architectures,
        "targets": _targets,
        "presets": _presets,
        "representations": _representations,
    }[what]()
    if json:
        print_json({what: [dict(row) for row in rows]})
    elif rows:
        print_table(tuple(rows[0]), [tuple(row.values()) for row in rows], numbers=False)
        next_step.tell(next_step.line(*_NEXT.get(what, ("list", "methods"))))


def _methods() -> list[dict[str, str]]:
    """Stages in the order of `moetool --help`; those of one command with those first that most should try first."""
    from moetool.stages import stages

    rows = []
    for command in commands():
        methods = [name for name, stage in stages().items() if command in (stage.method_of, name)]
        for name in in_order(command, methods) if command in CHOICES else methods:
            called = f"{command} --{CHOICES[command][0]}" if command in CHOICES else command
            rows.append({"method": name, "command": called, "summary": stages()[name].summary})
    return rows


def _architectures() -> list[dict[str, str]]:
    from moetool.architectures.known import KNOWN, REFUSED
    from moetool.architectures.listing import families_with_experts

    rows = []
    for family, model_types in families_with_experts().items():
        known = next((KNOWN[name] for name in model_types if name in KNOWN), None)
        refused = next((REFUSED[name] for name in model_types if name in REFUSED), None)
        rows.append(
            {
                "architecture": known.name if known else family,
                "model types": ", ".join(model_types),
                "router": known.router_rule if known else refused or "as transformers computes it",
            }
        )
    return rows


def _dense_architectures() -> list[dict[str, str]]:
    rows = [
        {
            "architecture": model_type,
            "model types": model_type,
            "beyond a Llama": "; ".join(f"{name}: {FEATURES[name]}" for name in known.features) or "nothing",
        }
        for model_type, known in KNOWN_DENSE.items()
    ]
    own = f"own_block: {FEATURES['own_block']}"
    return [*rows, {"architecture": "any other", "model types": "docs/families.md", "beyond a Llama": own}]


def _targets() -> list[dict[str, str]]:
    from moetool.upcycle.targets import targets

    return [
        {
            "target": target.name,
            "expresses": ", ".join(sorted(target.expresses)) if target.is_native else "everything",
            "needs": ", ".join(sorted(target.needs)) or "nothing",
        }
        for target in targets().values()
    ]


def _presets() -> list[dict[str, str]]:
    rows = []
    for file, content in presets.files().items():
        command = " --method ".join(content[key] for key in ("command", "method") if key in content)
        for preset, options in content.get("variants", {}).items():
            settings = ", ".join(f"{name} {value}" for name, value in options.items())
            rows.append({"preset": preset, "recipe": file.name, "command": command, "settings": settings})
    return rows


def _representations() -> list[dict[str, str]]:
    from moetool.representations import representations

    return [
        {"representation": kind, "stands for": "delta to the base" if entry.uses_base else "the matrix itself"}
        for kind, entry in sorted(representations().items())
    ]
