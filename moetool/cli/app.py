"""The `moetool` command, whose subcommands are built from a table of their options.

Help, completion and mistyped options are answered from the table, before anything heavy is imported.
`scripts/docs/options.py` writes it, `options.json`; a test compares it with the commands themselves. A stage that is
not in it, because its file is new, is imported at once.
"""

import importlib.util
import json
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from moetool.checkpoint.names import CONFIG
from moetool.checkpoint.source import local_path, refuse_missing
from moetool.cli.choosing import CHOICES, chosen, summary_of, typed_choice
from moetool.cli.command import HintingCommand, command_of, from_record
from moetool.cli.foreign import command_here
from moetool.cli.names import COMMAND_GROUPS, commands
from moetool.errors import MoetoolError, UsageError, did_you_mean, option_of
from moetool.job.processes import is_first_process
from moetool.stages import PLACES

FILE = Path(__file__).with_name("options.json")
_CHECKPOINTS = ("input", "model", "against", "to")  # parameters of commands
Offer = Callable[[str], list[str]]


class FrontCommand(HintingCommand):
    """A command built from the table. It has parsed its arguments once before it imports the command that runs."""

    words: tuple[str, ...] = ()

    def others(self, option: str) -> list[str]:
        forms_of, records = table()["forms"], table()["parameters"]
        name = option.removeprefix("--").replace("-", "_")
        having = {n for n, record in enumerate(records) if record["name"] == name and not record.get("argument")}
        return [
            other
            for other, forms in forms_of.items()
            if other != self.name and any(not having.isdisjoint(indices) for indices in forms.values())
        ]

    def invoke(self, ctx: Any) -> Any:
        # A log has the command's errors, too; what is pushed has no other place than a folder, and push says so.
        if ctx.params.get("log_json") is None and ctx.info_name != "push":
            _refuse_missing(ctx.params)
        command = imported(ctx.info_name, self.words)
        with command.make_context(ctx.info_name, list(self.words), parent=ctx.parent) as own:
            return command.invoke(own)


def _refuse_missing(typed: Mapping[str, Any]) -> None:
    """End the command for a checkpoint that is not there. The imports of a command take seconds."""
    named = [typed[name] for name in _CHECKPOINTS if typed.get(name)]
    try:
        _refuse_swapped(typed)
        for source in named:
            for each in [source] if isinstance(source, str) else source:
                refuse_missing(each)
    except MoetoolError as error:
        if is_first_process():
            print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error


def _refuse_swapped(typed: Mapping[str, Any]) -> None:
    """Raise `UsageError` where the one path that is a checkpoint stands where the output belongs."""
    given, output = typed.get("input"), typed.get("output")
    if not given or output is None or typed.get("resume") or typed.get("overwrite") or "/" in given:
        return
    if not local_path(given).exists() and (Path(output) / CONFIG).is_file():
        raise UsageError(f"OUTPUT {output} is a model, and INPUT {given} is not here. INPUT comes first: swap them.")


def imported(name: str, words: Sequence[str]) -> HintingCommand:
    """Import the module of the command that is to run, and build the command from its full options."""
    module = importlib.import_module(f"moetool.cli.commands.{commands()[name][0]}")
    command = module.build(name, list(words))
    assert isinstance(command, HintingCommand)
    command.elsewhere = _elsewhere(name)
    return command


def front(name: str, arguments: Sequence[str]) -> HintingCommand:
    """Build the command `name` from the table, for the words typed after it.

    Raises:
        typer.Exit: the option that chooses a stage (`--method`) names an unknown one.
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
    summary = summary_of(name, words, own, table()["summaries"][own]) if own else None
    command = command_of(name, lambda **_: None, parameters, FrontCommand, form=own, summary=summary)
    assert isinstance(command, FrontCommand)
    command.words, command.elsewhere = words, _elsewhere(name)
    return command


@cache
def table() -> dict[str, Any]:
    """Content of `options.json`: the `parameters` of all commands, the indices of those that each form of a command
    has (`forms`), the `summaries` of these forms, and `names` of methods and targets."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def _has_file(stage: str) -> bool:
    """Whether a stage has a file of its name in one of the directories of stages."""
    specs = (importlib.util.find_spec(f"moetool.{place}") for place in PLACES)
    homes = [spec.submodule_search_locations for spec in specs if spec and spec.submodule_search_locations]
    return any(info.name == stage.replace("-", "_") for home in homes for info in pkgutil.iter_modules(home))


def _offer(command: str, parameter: str, words: Sequence[str]) -> Offer | None:
    """Shell completion of a parameter whose values have names; `None` for any other."""
    if command in CHOICES and parameter == CHOICES[command][0]:
        return offered(lambda: table()["forms"][command])
    if parameter == "preset":
        return offered_presets(command, typed_choice(command, words) if command in CHOICES else None)
    names = table()["names"].get(parameter)
    return None if names is None else offered(partial(iter, names))


def _elsewhere(command: str) -> dict[str, str]:
    """By option, the `--method` or `--format` with which a command has it."""
    if command not in CHOICES:
        return {}
    places: dict[str, list[str]] = {}
    for form, indices in table()["forms"][command].items():
        for index in indices:
            record = table()["parameters"][index]
            places.setdefault(option_of(record["name"]), []).append(form)
    return {option: f"--{CHOICES[command][0]} {' or '.join(forms)}" for option, forms in places.items()}


def offered(names: Callable[[], Iterable[str]]) -> Offer:
    """Completion by the names that start as the typed word does, or as the part of it after its last comma."""

    def offer(incomplete: str) -> list[str]:
        before, comma, own = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(own)]

    return offer


def offered_presets(command: str, method: str | None) -> Offer:
    """Completion by the presets of a command, or of its method if one was typed."""

    def names() -> Iterable[str]:
        from moetool.cli.presets import presets_for

        return presets_for(command, method)

    return offered(names)


class LazyGroup(TyperGroup):
    """A group whose help needs one line per command, and whose calls load one command."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (known := commands().get(cmd_name)) is None:
            return None
        return TyperCommand(cmd_name, help=known[1], short_help=known[1])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one line per command into `moetool --help`, in groups."""
        known = commands()
        grouped = {name for names in COMMAND_GROUPS.values() for name in names}
        *groups, (last, names) = COMMAND_GROUPS.items()
        for title, those in (*groups, (last, (*names, *(name for name in known if name not in grouped)))):
            with formatter.section(title):
                formatter.write_dl([(name, known[name][1]) for name in those])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        known = commands()
        if args[0] not in known and not args[0].startswith("-"):
            ctx.fail(f"No such command '{args[0]}'.{command_here(args[0]) or did_you_mean(args[0], known)}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name in known:
            command = front(name, rest)
        return name, command, rest


app = typer.Typer(
    cls=LazyGroup,
    name="moetool",
    help="Turn dense checkpoints into MoE models, and make MoE models smaller.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        from moetool.version import __version__

        print(f"moetool {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Take the options of `moetool` itself, which are typed before the name of a command."""
