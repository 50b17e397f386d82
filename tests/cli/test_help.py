"""`--help`: grouped, with an example that the command itself takes."""

import importlib
import shlex
from typing import Any

import pytest

from moetool.cli.examples import EXAMPLES
from moetool.cli.names import COMMANDS


def built(command: str, *arguments: str) -> Any:
    return importlib.import_module(f"moetool.cli.commands.{COMMANDS[command][0]}").build(command, list(arguments))


def test_every_command_has_an_example() -> None:
    assert EXAMPLES.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_are_taken(command: str) -> None:
    name, *arguments = shlex.split(EXAMPLES[command])
    assert name == command
    built(command, *arguments).make_context(command, [*arguments])  # exits for what it does not know


def test_options_that_many_commands_share_come_behind_its_own() -> None:
    command = built("compress", "--method", "hybrid")
    text = command.get_help(command.make_context("compress", [], resilient_parsing=True))
    places = [text.index(f"\n{title}:\n") for title in ("Arguments", "Options", "Job", "Calibration", "Machine")]
    assert places == sorted(places)
    own, job, calibration, machine = (
        text[start:end] for start, end in zip(places[1:], [*places[2:], None], strict=True)
    )
    assert "--trellis" in own
    assert "--resume" in job
    assert "--gradient-samples" in calibration
    assert "--memory" in machine
    assert "Example: moetool compress" in machine


@pytest.mark.parametrize(
    ("command", "typed", "default"), [("upcycle", "pesc", "vanilla"), ("compress", "auto", "d2moe")]
)
def test_the_default_method_is_not_what_was_typed(command: str, typed: str, default: str) -> None:
    command_line = built(command, "--method", typed)
    context = command_line.make_context(command, [], resilient_parsing=True)
    (option,) = (parameter for parameter in command_line.params if parameter.name == "method")
    assert option.get_help_record(context)[1].endswith(f"[default: {default}]")
