"""The command that makes a model again, from what its manifest says."""

import shlex
from collections.abc import Mapping
from typing import NamedTuple

import yaml

from moetool.stages import stages

_CHOICE = {"export": "format"}  # by which option a command chooses among its stages, if not by `--method`


class Remaking(NamedTuple):
    """A command line, and the preset that it reads, if it needs one."""

    command: str
    preset: str | None


def remaking(recipe: Mapping[str, object], source: str, output: str = "OUTPUT") -> Remaking | None:
    """Command and preset that repeat the stage of a manifest, without options that equal today's defaults.

    Args:
        recipe: stage and options.
        source: what it was made from, as the user named it.
        output: where to.

    Returns:
        `None` if this moetool has no such stage, or no longer has one of its options.
    """
    kind = stages().get(str(recipe.get("stage")))
    given = {name: value for name, value in recipe.items() if name != "stage"}
    if kind is None or not given.keys() <= kind.options_type.model_fields.keys():
        return None
    fields = kind.options_type.model_fields
    said = {
        name: value
        for name, value in given.items()
        if fields[name].is_required() or value != fields[name].get_default(call_default_factory=True)
    }
    command = kind.method_of or kind.name
    words = ["moetool", command, source, output]
    if kind.method_of is not None:
        words += [f"--{_CHOICE.get(command, 'method')}", kind.name]
    if any(isinstance(value, list | dict) and value for value in said.values()):
        choice = {} if kind.method_of is None else {"method": kind.name}
        text = yaml.safe_dump({"command": command, **choice, "options": said}, sort_keys=False, allow_unicode=True)
        return Remaking(shlex.join([*words, "--preset", "preset.yaml"]), text)
    for name, value in said.items():
        words += _option(name.replace("_", "-"), value)
    return Remaking(shlex.join(words), None)


def _option(flag: str, value: object) -> list[str]:
    """As words; nothing where nothing says what `null` and an empty list say."""
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [] if value is None or value == [] else [f"--{flag}", str(value)]
