"""Commands by a table of their options, so that help, completion and slips are answered before anything is imported.

`scripts/docs/options.py` writes the table, `options.json`; a test compares it with the commands themselves. A stage
that is not in it, because its file is new, is imported at once.
"""

import importlib.util
import json
import pkgutil
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from moetool.cli.choosing import CHOICES, chosen, typed_choice
from moetool.cli.command import HintingCommand, command_of, from_record
from moetool.cli.completion import Offer, offered, offered_presets
from moetool.cli.names import commands
from moetool.stages import PLACES

FILE = Path(__file__).with_name("options.json")


class FrontCommand(HintingCommand):
    """A command of the table. What it is called with was parsed once when it imports the command that does the work."""

    words: tuple[str, ...] = ()

    def invoke(self, ctx: Any) -> Any:
        command = imported(ctx.info_name, self.words)
        with command.make_context(ctx.info_name, list(self.words), parent=ctx.parent) as own:
            return command.invoke(own)


def imported(name: str, words: Sequence[str]) -> HintingCommand:
    """The command itself, with all that it needs to run."""
    module = importlib.import_module(f"moetool.cli.commands.{commands()[name][0]}")
    command = module.build(name, list(words))
    assert isinstance(command, HintingCommand)
    return command


def front(name: str, arguments: Sequence[str]) -> HintingCommand:
    """The command of that name for what was typed behind it.

    Raises:
        typer.Exit: the option that chooses a stage names none that there is.
    """
    words = tuple(arguments)  # the parser empties the list
    forms = table()["forms"].get(name, {})
    typed = typed_choice(name, words) if name in CHOICES else None
    if not forms or (typed is not None and typed not in forms and _has_file(typed)):
        return imported(name, words)
    own = chosen(name, words, forms) if name in CHOICES else ""
    records = [table()["parameters"][index] for index in forms[own]]
    if name in CHOICES:
        records = [record | {"default": own} if record["name"] == CHOICES[name][0] else record for record in records]
    parameters = [from_record(record, _offer(name, record["name"], words)) for record in records]
    command = command_of(name, lambda **_: None, parameters, FrontCommand)
    assert isinstance(command, FrontCommand)
    command.words, command.elsewhere = words, _elsewhere(name)
    return command


@cache
def table() -> dict[str, Any]:
    """Content of `options.json`: the `parameters` of all commands, the indices of those that each form of a command
    has (`forms`), and `names` of methods and targets."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def _has_file(stage: str) -> bool:
    """Whether a stage has a file of its name in one of the directories of stages."""
    specs = (importlib.util.find_spec(f"moetool.{place}") for place in PLACES)
    homes = [spec.submodule_search_locations for spec in specs if spec and spec.submodule_search_locations]
    return any(info.name == stage.replace("-", "_") for home in homes for info in pkgutil.iter_modules(home))


def _offer(command: str, parameter: str, words: Sequence[str]) -> Offer | None:
    """What a shell offers for a parameter whose values have names; `None` for any other."""
    if command in CHOICES and parameter == CHOICES[command][0]:
        return offered(lambda: table()["forms"][command])
    if parameter == "preset":
        return offered_presets(command, typed_choice(command, words) if command in CHOICES else None)
    names = table()["names"].get(parameter)
    return None if names is None else offered(partial(iter, names))


def _elsewhere(command: str) -> dict[str, str]:
    """What to type for each option that some form of a command has, by option."""
    if command not in CHOICES:
        return {}
    places: dict[str, list[str]] = {}
    for form, indices in table()["forms"][command].items():
        for index in indices:
            record = table()["parameters"][index]
            places.setdefault("--" + record["name"].replace("_", "-"), []).append(form)
    return {option: f"--{CHOICES[command][0]} {' or '.join(forms)}" for option, forms in places.items()}
