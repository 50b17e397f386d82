"""Commands from pydantic models: one option per field, help from its description, so the two cannot drift apart."""

import functools
import inspect
import re
import signal
import sys
from collections.abc import Callable, Mapping
from reprlib import repr  # an alias of an alias of … is short in a preset, and not as a message
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from moetool.checkpoint.sizes import format_bytes, parse_bytes, parse_part, parse_share, parse_window_share
from moetool.cli.command import HintingCommand, command_of, of_a_value, quoted_choices
from moetool.errors import UsageError, did_you_mean, explained, option_of
from moetool.job.options import joined

ModelT = TypeVar("ModelT", bound=BaseModel)

# How `--help` calls a value that is read by one of these.
_WRITTEN: Mapping[object, str] = {
    parse_bytes: "<size>",
    parse_share: "<share>",
    parse_window_share: "<share>",
    parse_part: "<share>",
}


def builder(
    model: type[BaseModel] | None = None, *more: inspect.Parameter
) -> Callable[[Callable[..., None]], Callable[[str, list[str]], HintingCommand]]:
    """Make of what a command does `build(name, arguments)`, which gives the command, whatever the arguments are."""

    def made(function: Callable[..., None]) -> Callable[[str, list[str]], HintingCommand]:
        return lambda name, arguments: make_command(name, function, model, *more)

    return made


def make_command(
    name: str,
    function: Callable[..., None],
    model: type[BaseModel] | None,
    *more: inspect.Parameter,
    form: str = "",
    summary: str | None = None,
) -> HintingCommand:
    """A single command whose errors end with moetool's exit codes.

    Args:
        name: of the command.
        function: what it does.
        model: its fields become options, which the function takes as `**options`. Defaults are left to the model, so
            that what was typed can be told from what was not (a preset comes between).
        more: further options that it takes in this way.
        form: value of the option that chooses a stage, where there is one.
        summary: first line of `--help`, unless it is the one of the list of commands.
    """
    own = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    fields = [] if model is None else parameters_of(model)
    return command_of(name, guarded(function), [*own, *more, *fields], form=form, summary=summary)


def guarded(function: Callable[..., None]) -> Callable[..., None]:
    """Turn errors a user can cause into one line on stderr and an exit code; let bugs through."""

    @functools.wraps(function)
    def wrapper(**arguments: object) -> None:
        try:
            function(**arguments)
            sys.stdout.flush()  # here a full disk is an error of the command
        except KeyboardInterrupt as error:
            resumable = "resume" in inspect.signature(function).parameters
            hint = ": nothing finished is lost, go on with --resume" if resumable else ""
            print(f"interrupted{f': {error}' if error.args else hint}", file=sys.stderr)
            raise typer.Exit(128 + signal.SIGINT) from error
        except BrokenPipeError:
            raise typer.Exit(0) from None
        except Exception as error:
            if (problem := explained(error)) is None:
                raise
            print(f"error: {problem}", file=sys.stderr)
            raise typer.Exit(problem.exit_code) from error

    return wrapper


def parameters_of(model: type[BaseModel]) -> list[inspect.Parameter]:
    """Turn the fields of an options model into keyword parameters of a command."""

    def parameter(name: str, field: FieldInfo) -> inspect.Parameter:
        annotation = _annotation(name, field, _group(model, name))
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    return [parameter(name, field) for name, field in model.model_fields.items()]


def _group(model: type[BaseModel], name: str) -> str | None:
    """The `group` of the set of options that a field was written in, if that has one."""
    owner = next(kind for kind in model.__mro__ if name in inspect.get_annotations(kind))
    group = vars(owner).get("group")
    return group if isinstance(group, str) else None


def _annotation(name: str, field: FieldInfo, group: str | None) -> object:
    flag = option_of(name)
    written = next((_WRITTEN[rule] for rule in _rules(field) if rule in _WRITTEN), None)
    is_size, kind = written == "<size>", _plain_type(field) if written is None else str
    description = field.description or ""
    if re.search(r"\[(default|required)", description):
        pass  # it is said already, with more to it
    elif field.is_required():
        description += " [required]"
    elif kind is bool:
        description += " [default: on]" if field.default else ""
    elif field.default is not None and field.default != ():
        default = format_bytes(field.default) if is_size else field.default
        description += f" [default: {default}]"
    names = (flag, option_of(f"no_{name}")) if kind is bool else (flag,)
    option = typer.Option(
        "/".join(names),
        help=description,
        show_default=False,
        rich_help_panel=group,
        metavar=written,
        case_sensitive=False,
    )
    return Annotated[kind | None, option]


def _rules(field: FieldInfo) -> list[object]:
    """The functions that read what is typed for a field."""
    of_kinds = [rule for kind in get_args(field.annotation) for rule in getattr(kind, "__metadata__", ())]
    return [getattr(rule, "func", None) for rule in (*field.metadata, *of_kinds)]


def _plain_type(field: FieldInfo) -> Any:
    """The type a command line can read: `int | None` → `int`; lists, also those that are one text with commas, →
    `list[str]`; sizes and anything unusual → `str`."""
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    if joined in _rules(field):
        return list[str]
    is_annotated = get_origin(annotation) is Annotated
    if get_origin(get_args(annotation)[0] if is_annotated else annotation) is tuple:
        return list[str]
    if is_annotated or annotation not in (int, float, bool, str):
        return annotation if get_origin(annotation) is Literal else str
    return annotation


def build_options(
    model: type[ModelT], typed: Mapping[str, object], preset: Mapping[str, object] | None = None
) -> ModelT:
    """The model from a preset's options and, over it, what was typed.

    Raises:
        UsageError: a value that does not fit, a name that does not exist.
    """
    said = {name: value for name, value in typed.items() if value is not None and value != []}
    alternatives = getattr(model, "alternatives", ())
    replaced = set(alternatives) if any(name in said for name in alternatives) else set()
    given = {name: value for name, value in (preset or {}).items() if name not in replaced} | said

    def place(name: str | int = "") -> str:
        """Where an option stands, to begin a message with: nothing for what was typed."""
        return "In the preset: " if name in given and name not in said else ""

    for name, value in given.items():
        field = model.model_fields.get(name)
        if isinstance(value, bool) and field is not None and _plain_type(field) is not bool:
            # pydantic would take it for 1 or 0
            flag = place(name) + option_of(name)
            raise UsageError(f"{flag} {str(value).lower()}: it takes a value, not true or false")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        told = (place(*problem["loc"][:1]) + _explain(model, problem) for problem in error.errors())
        raise UsageError("; ".join(told)) from error


def _explain(model: type[BaseModel], problem: ErrorDetails) -> str:
    message = of_a_value(problem["msg"].removeprefix("Value error, "))
    if not problem["loc"]:
        return str(message)
    name = str(problem["loc"][0])
    if len(problem["loc"]) > 1:
        place = name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"][1:])
        return f"{place}: {'no such entry' if problem['type'] == 'extra_forbidden' else message}"
    if problem["type"] == "extra_forbidden":
        known = model.model_fields
        return f"no such option '{name}'; there are {', '.join(known)}.{did_you_mean(name, known)}"
    if problem["type"] == "literal_error":
        message += "." + did_you_mean(str(problem["input"]), quoted_choices(problem["ctx"]["expected"]))
    flag = option_of(name)
    if problem["type"] == "missing":
        field = model.model_fields.get(name)
        meaning = re.sub(r" \[required.*\]$", "", (field and field.description) or "")
        return f"{flag} is required. {meaning}" if meaning else f"{flag} is required."
    if (said := problem["input"]) is None:
        return f"{flag} has no value."
    typed = ",".join(said) if isinstance(said, list) and all(isinstance(one, str) for one in said) else said
    return f"{flag} {typed if isinstance(typed, str) else repr(typed)}: {message}"
