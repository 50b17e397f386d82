"""Commands that are several stages, and the option that chooses one of them."""

import sys
from collections.abc import Collection, Iterable, Sequence

import typer

from moetool.errors import MoetoolError, UsageError, did_you_mean

# The option that chooses, and what it is without it.
CHOICES = {
    "compress": ("method", "auto"),
    "upcycle": ("method", "vanilla"),
    "moefy": ("method", "g-moefication"),
    "export": ("format", "dense-experts"),
}
# Those to try first; the others follow by name.
_FIRST = {
    "compress": ("auto", "hybrid", "quantize", "d2moe", "ders-quantize", "ders-sparsify", "reap"),
    "upcycle": ("vanilla", "fine-grained", "drop", "branch-train-mix", "add-expert"),
    "moefy": ("g-moefication",),
    "export": ("dense-experts", "gguf", "mlx", "compressed-tensors", "dense"),
}


def in_order(command: str, known: Iterable[str]) -> list[str]:
    """Stages of a command, recommended ones first, the others by name."""
    first = _FIRST[command]
    return sorted(known, key=lambda name: (first.index(name) if name in first else len(first), name))


def typed_choice(command: str, arguments: Sequence[str]) -> str | None:
    """Value of the option that chooses a stage (`--method`, `--format`), in lower case; `None` if it was not typed."""
    typed = _value(arguments, f"--{CHOICES[command][0]}")
    return None if typed is None else typed.lower()


def chosen(command: str, arguments: Sequence[str], known: Collection[str]) -> str:
    """The stage that a command line asks for: by the option, by its preset, or the default. It decides which other
    options there are.

    Raises:
        typer.Exit: it is none of those that are known, which was said.
    """
    choice, default = CHOICES[command]
    typed = typed_choice(command, arguments)
    asked = typed or _preset_method(command, arguments) or default
    if asked not in known:
        where = "" if typed else "In the preset: "
        hint = did_you_mean(asked, known)
        print(f"error: {where}--{choice} {asked}: there is {', '.join(known)}.{hint}", file=sys.stderr)
        raise typer.Exit(UsageError.exit_code)
    return asked


def _preset_method(command: str, arguments: Sequence[str]) -> str | None:
    """The method of the preset, if there is one for this command that names it."""
    if (preset := _value(arguments, "--preset")) is None:
        return None
    from moetool.cli.presets import preset_method

    try:
        return preset_method(preset, command)
    except MoetoolError:
        return None  # the command itself says what is wrong with the preset


def _value(arguments: Sequence[str], option: str) -> str | None:
    """Value of an option on the command line, the last if it is there twice; `None` if it is not there."""
    said = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name != option:
            continue
        if equals:
            said = value
        elif position + 1 < len(arguments):
            said = arguments[position + 1]
    return said


def summary_of(command: str, words: Sequence[str], form: str, summary: str) -> str | None:
    """The first line of `--help` where the option that chooses a form was typed: what this form does."""
    if typed_choice(command, words) is None:
        return None
    return f"--{CHOICES[command][0]} {form}: {summary}."
