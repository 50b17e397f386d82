"""`--help`: grouped, with an example that the command itself takes."""

import importlib
import shlex
from typing import Any

import pytest

from moetool.cli.app import front, table
from moetool.cli.examples import EXAMPLES, MAIN
from moetool.cli.names import COMMAND_GROUPS, COMMANDS, commands


def built(command: str, *arguments: str) -> Any:
    return importlib.import_module(f"moetool.cli.commands.{COMMANDS[command][0]}").build(command, list(arguments))


def test_every_command_has_an_example() -> None:
    assert {key.split()[0] for key in EXAMPLES} == COMMANDS.keys() == EXAMPLES.keys() & COMMANDS.keys()


@pytest.mark.parametrize("key", EXAMPLES)
def test_examples_are_taken(key: str) -> None:
    command, *form = key.split()
    name, *arguments = shlex.split(EXAMPLES[key])
    assert name == command
    example = built(command, *arguments)
    assert not form or example.form == form[0]
    example.make_context(command, [*arguments])  # exits for what it does not know


def shown(command: Any, name: str) -> str:
    return str(command.get_help(command.make_context(name, [], resilient_parsing=True)))


def test_options_that_most_want_come_first_and_shared_ones_on_request() -> None:
    command = built("compress", "--method", "hybrid")
    text = shown(command, "compress")
    assert text.index("\nArguments:\n") < text.index("\nMain options:\n") < text.index("\nOptions:\n")
    main, own = text.partition("\nOptions:\n")[::2]
    assert [main.index(f"--{name} ") for name in ("method", "ratio", "calibration", "dry-run", "resume")]
    assert "--trellis" in own
    assert "--keep-stored" in own
    assert "--memory" not in text
    assert "--help-all shows" in text
    assert "These are the options of --method hybrid" in text
    assert "Example: moetool compress" in text


def test_options_that_no_other_method_has_stand_apart() -> None:
    text = shown(front("compress", ["--method", "auto"]), "compress")
    shared, only = text.split("\nOptions of --method auto:\n")
    for option in ("--merge", "--base-bits", "--rotate", "--include"):
        assert f"  {option} " in shared, "with hybrid, too"
    for option in ("--max-increase", "--held-out", "--save-plan"):
        assert f"  {option} " in only
    assert "Options of --method" not in shown(front("compress", ["--method", "hybrid"]), "compress")


def test_options_for_some_models_stand_apart() -> None:
    text = shown(built("tune"), "tune")
    own, masks = text.split("\nModels of upcycle --method simoe:\n")
    assert "SIMoE" not in own
    assert "--mask-learning-rate" in masks
    assert "--memory" not in text
    places = [own.index(title) for title in ("\nMain options:", "\nOptions:", "\nWhat is trained:", "\nDistillation:")]
    assert places == sorted(places)
    text = shown(built("eval"), "eval")
    assert text.index("\nMain options:") < text.index("--data") < text.index("\nOptions:") < text.index("\nTasks:")
    assert "--few-shot" in text.partition("\nTasks:")[2]


def test_help_all_has_every_option() -> None:
    command = built("compress", "--method", "hybrid")
    text = command.get_help(command.make_context("compress", ["--help-all"], resilient_parsing=True))
    titles = ("Arguments", "Main options", "Options", "Job", "Calibration", "Machine")
    places = [text.index(f"\n{title}:\n") for title in titles]
    assert sorted(places) == [*places[:3], *sorted(places[3:])]
    for parameter in command.params:
        assert parameter.param_type_name == "argument" or parameter.opts[0] in text
    assert "--help-all shows" not in text


@pytest.mark.parametrize("name", MAIN)
def test_main_options_are_options_of_some_form(name: str) -> None:
    command, *own = name.split()
    forms = table()["forms"][command]
    records = [table()["parameters"][index] for form in (own or forms) for index in forms[form]]
    assert set(MAIN[name]) <= {"--" + record["name"].replace("_", "-") for record in records}


def test_every_command_is_in_one_group(run_cli: Any) -> None:
    grouped = [name for names in COMMAND_GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) <= commands().keys()
    text = run_cli("--help").stdout
    assert all(f"\n  {name} " in text for name in commands())


@pytest.mark.parametrize(
    ("command", "typed", "default"), [("upcycle", "pesc", "vanilla"), ("compress", "d2moe", "auto")]
)
def test_the_default_method_is_not_what_was_typed(command: str, typed: str, default: str) -> None:
    command_line = built(command, "--method", typed)
    context = command_line.make_context(command, [], resilient_parsing=True)
    (option,) = (parameter for parameter in command_line.params if parameter.name == "method")
    assert option.get_help_record(context)[1].endswith(f"[default: {default}]")


def test_help_of_a_form_says_what_it_does_and_lists_long_choices_once(run_cli: Any) -> None:
    text = " ".join(run_cli("export", "--format", "gguf", "--help").stdout.split())
    assert "--format gguf: one file for llama.cpp" in text
    assert text.index("--size") < text.index("--type NAME") < text.index("One of: f32, f16")
    assert "Example: moetool export mistralai/Mixtral-8x7B-v0.1 for-llama-cpp --format gguf" in text
    assert run_cli("export", "--help").stdout.split("Arguments:")[0].count("--format") == 1
