"""A command that hints at what was probably meant, and its parameters as data."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo, ParameterInfo

from moetool.cli.choosing import CHOICES
from moetool.cli.examples import EXAMPLES, MAIN, of_form
from moetool.cli.foreign import belongs_to, ours, sizing
from moetool.cli.names import commands
from moetool.errors import did_you_mean
from moetool.job.processes import is_first_process

_MAIN, _UNGROUPED = "Main options", "Options"
_SHARED = ("Job", "Calibration", "Machine")  # groups of options that many commands have
_HELP_ALL = "--help-all"
_KINDS: Mapping[str, Any] = MappingProxyType(
    {"str": str, "int": int, "float": float, "bool": bool, "path": Path, "list": list[str]}
)
_SHORT_LIST = 8  # names that a value may have; more of them stand in the text and not beside the option
# What typer is told of a parameter, beside flags and default.
_FIELDS = ("help", "rich_help_panel", "min", "max", "metavar")


class HintingCommand(TyperCommand):
    """A command that says which option or choice was probably meant.

    Attributes:
        form: the value of `--method` or `--format` that was typed or is the default; empty if there is no such option.
        elsewhere: what to type for options that only other forms of the command have, by option.
        parameters: arguments and options, in order.
        shows_all: whether `--help` shows the options that many commands share.
    """

    form: str = ""
    elsewhere: Mapping[str, str] = MappingProxyType({})
    parameters: tuple[inspect.Parameter, ...] = ()
    shows_all: bool = False
    _left: dict[str, int]

    def others(self, option: str) -> Sequence[str]:
        """Name the other commands that have an option, as far as they are known."""
        return ()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, the options that most want, the other ones of the command itself, with those of one purpose and
        those that no other form has as groups, and with `--help-all` the groups that many commands share."""
        main = of_form(MAIN, self.name or "", self.form) or ()
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], _MAIN: [], _UNGROUPED: []}
        self._left = {}  # by group, how many are not shown
        for parameter in sorted(self.get_params(ctx), key=lambda one: _place(one.opts, main)):
            if (record := parameter.get_help_record(ctx)) is None:
                continue
            group = getattr(parameter, "rich_help_panel", None) or self._own_group(parameter.opts[0])
            if parameter.param_type_name != "option":
                sections["Arguments"].append(record)
            elif _place(parameter.opts, main) < len(main):
                sections[_MAIN].append(record)
            elif group not in _SHARED or self.shows_all or not main:
                sections.setdefault(group or _UNGROUPED, []).append(record)
            else:
                self._left[group] = self._left.get(group, 0) + 1
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _own_group(self, option: str) -> str | None:
        """Title of the options that only this form of the command has, if the option is one of them."""
        if (choice := CHOICES.get(self.name or "")) is None:
            return None
        form = f"--{choice[0]} {self.form}"
        return f"Options of {form}" if self.elsewhere.get(option) == form else None

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the end of `--help`: which groups of options it leaves out, and an example."""
        if self._left:
            groups = ", ".join(f"{group} ({count})" for group, count in self._left.items())
            formatter.write_paragraph()
            formatter.write_text(f"--help-all shows these groups of options, too: {groups}.")
        if (choice := CHOICES.get(self.name or "")) is not None:
            formatter.write_paragraph()
            formatter.write_text(
                f"These are the options of --{choice[0]} {self.form}; "
                f"moetool {self.name} --{choice[0]} NAME --help shows those of another."
            )
        super().format_epilog(ctx, formatter)

    def make_parser(self, ctx: Any) -> Any:
        """The parser of the command line, which keeps every value of an option, so that one of another kind than a list
        cannot be given two: of these the last would count, and nobody would be told. An empty path is refused, too.

        Its errors are those of the parser: exit code 2.
        """
        parameters = [cast(Any, one) for one in self.get_params(ctx)]
        options = [one for one in parameters if one.param_type_name == "option"]
        arguments = [one for one in parameters if one.param_type_name == "argument"]
        kinds = {one.name: get_args(one.annotation)[0] for one in self.parameters}
        paths = [one for one in parameters if Path in ((kind := kinds.get(one.name)), *get_args(kind))]
        single = [one for one in options if not getattr(one, "multiple", False)]
        for option in single:  # only for what it tells the parser
            option.multiple = True
        parser: Any = super().make_parser(ctx)
        for option in single:
            option.multiple = False
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            found, *rest = parse(args)
            for option in single:
                if option.name in found:
                    found[option.name] = _only(ctx, option, found[option.name])
            for one in paths:
                if found.get(one.name) == "":  # of a shell's variable that is not set; `Path("")` is the folder here
                    ctx.fail(f"{one.metavar if one in arguments else one.opts[0]} is empty: give a path.")
            return found, *rest

        parser.parse_args = parse_args
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.shows_all = _HELP_ALL in args
        try:
            return super().parse_args(ctx, ["--help" if word == _HELP_ALL else word for word in args])
        # By what they carry, not by class: some versions of typer have click's errors, others have their own.
        except Exception as raised:
            if not is_first_process():  # which was given the same words, and says so
                raise typer.Exit(getattr(raised, "exit_code", 1)) from raised
            error: Any = raised
            if hasattr(error, "option_name") and hasattr(error, "possibilities"):
                option, there = error.option_name, self.elsewhere.get(error.option_name)
                known = [name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)]
                arguments = [own.name.upper() for own in self.params if own.param_type_name == "argument" and own.name]
                hint = sizing(self.name or "", option, known)
                if there:
                    hint += f" {option if hint else 'It'} exists with {there}."
                hint = hint or ours(self.name or "", option, known, arguments) or did_you_mean(option, known)
                hint = hint or belongs_to(self.others(option))
                error.possibilities, error.message = None, f"No such option: {option}.{hint}"
            elif wrong := re.search(r"'([^']*)' is not one of (.*)", getattr(error, "message", "")):
                error.message = wrong[0] + did_you_mean(wrong[1], quoted_choices(wrong[2]))
            elif hasattr(error, "message") and "unexpected extra argument" in error.message:
                arguments = [own.name.upper() for own in self.params if own.param_type_name == "argument" and own.name]
                alone = f"Only {' and '.join(arguments)}" if arguments else "Nothing"
                verb = "are" if len(arguments) > 1 else "is"
                error.message += f". {alone} {verb} typed without an option's name; words with spaces need quotes."
            elif hasattr(error, "message"):
                error.message = of_a_value(error.message)
            raise


def _only(ctx: Any, option: Any, values: Sequence[object]) -> object:
    """The value of an option that was given at least once; two that differ end the command with exit code 2."""
    first, *others = dict.fromkeys(values)
    if others and not ctx.resilient_parsing:  # as when a shell completes
        if isinstance(first, bool):
            ctx.fail(f"{option.opts[0]} and {option.secondary_opts[0]} exclude each other: give one of them.")
        ctx.fail(f"{option.opts[0]} is given twice, as {first} and as {others[0]}: give it once.")
    return values[-1]


def _place(names: Sequence[str], main: Sequence[str]) -> int:
    """Position of an option among the main ones; their number if it is not one of them."""
    return next((main.index(name) for name in names if name in main), len(main))


def of_a_value(message: str) -> str:
    """Pydantic's words for a value that does not fit, without its "Input", which is an argument of most commands, and
    without what its parser could not do."""
    return re.sub(r", unable to parse string as an? \w+", "", message.replace("Input should", "it should"))


def quoted_choices(text: str) -> list[str]:
    """Extract the quoted words of an error message that lists choices, such as `'a', 'b' or 'c'`."""
    return re.findall("'([^']*)'", text)


def command_of(
    name: str,
    function: Callable[..., None],
    parameters: Iterable[inspect.Parameter],
    kind: type[HintingCommand] = HintingCommand,
    *,
    form: str,
    summary: str | None,
) -> HintingCommand:
    """Build the command `name` that calls a function with these parameters, which are annotated as typer reads them.

    Args:
        name: of the command.
        function: what it does.
        parameters: of the function.
        kind: class of the command.
        form: value of the option that chooses a stage, where there is one.
        summary: first line of `--help`, unless it is the one of the list of commands.
    """
    parameters = tuple(parameters)

    def run(**arguments: object) -> None:
        function(**arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    example = of_form(EXAMPLES, name, form)
    epilog = None if example is None else f"Example: moetool {example}"
    app.command(name=name, help=summary or commands()[name][1], epilog=epilog, cls=kind)(run)
    command = typer.main.get_command(app)
    assert isinstance(command, HintingCommand)
    values = {one.name: _names(get_args(one.annotation)[0]) for one in parameters}
    for parameter in command.params:
        if parameter.param_type_name == "argument" and parameter.name:
            parameter.metavar = parameter.name.upper()  # as docs and messages call it
        elif len(names := values.get(parameter.name, ())) > _SHORT_LIST:
            parameter.metavar, option = "NAME", cast(Any, parameter)
            option.help = f"{option.help} One of: {', '.join(names)}."
    command.form, command.parameters = form, parameters
    return command


def _names(kind: Any) -> tuple[str, ...]:
    """Values that a parameter may have, if there are only some."""
    if get_origin(kind) in (Union, UnionType):
        kind = get_args(kind)[0]
    return get_args(kind) if get_origin(kind) is Literal else ()


def to_record(parameter: inspect.Parameter) -> dict[str, Any]:
    """A parameter as JSON: what the command line reads of it, and what `--help` says."""
    kind, info = get_args(parameter.annotation)[:2]
    assert isinstance(info, ParameterInfo)
    if is_optional := get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    record: dict[str, Any] = {
        "name": parameter.name,
        "kind": _kind_name(kind),
        "optional": is_optional,
        "argument": isinstance(info, ArgumentInfo),
        # With Annotated, typer takes its first positional argument for a flag, and notes it as the default.
        "flags": [*([info.default] if isinstance(info.default, str) else []), *(info.param_decls or ())],
        "shows_default": bool(info.show_default),
        **{name: getattr(info, name, None) for name in _FIELDS},
    }
    record = {name: value for name, value in record.items() if value is not None and value is not False and value != []}
    if (default := parameter.default) is not inspect.Parameter.empty:
        record["default"] = str(default) if isinstance(default, Path) else default
    return record


def _kind_name(kind: Any) -> str | list[object]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) is list:
        return "list"
    return next(name for name, known in _KINDS.items() if known is kind)


def from_record(record: Mapping[str, Any], offer: Callable[[str], list[str]] | None = None) -> inspect.Parameter:
    """The parameter that `to_record` had.

    Args:
        record: as `to_record` gives it.
        offer: what a shell is offered for a beginning of the parameter's value.
    """
    said = record["kind"]
    kind: Any = Literal[tuple(said)] if isinstance(said, list) else _KINDS[said]
    make = typer.Argument if record.get("argument") else typer.Option
    info = make(
        *(() if record.get("argument") else record.get("flags", ())),
        show_default=record.get("shows_default", False),
        autocompletion=offer,
        case_sensitive=False,
        **{name: record[name] for name in _FIELDS if name in record},
    )
    default = record.get("default", inspect.Parameter.empty)
    if said == "path" and isinstance(default, str):
        default = Path(default)
    return inspect.Parameter(
        record["name"],
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if record.get("optional") else kind, info],
    )
