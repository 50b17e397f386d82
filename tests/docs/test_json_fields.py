"""docs/json.md has every field that commands print with `--json`, and none that they do not."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pages import RUN_FOR_JSON, RUNNING, sections
from stub_tasks import stub_tasks

from moetool.cli.names import COMMANDS
from moetool.demo import DemoModel

OWN = {
    *("eval", "compare", "generate", "routing", "bench", "inspect", "report", "verify", "push", "list", "doctor"),
    *("demo", "recommend"),
}

TASKS = "eval of several models, or on tasks"


def printed(value: Any, path: str = "") -> Iterator[str]:
    """Every path to something that is neither an object nor a list of objects."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            name = "{layer}" if key.isdigit() else key
            yield from printed(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from printed(inner, f"{path}[]")
    else:
        yield path


def documented(section: str) -> dict[str, bool]:
    """The fields of a section, and whether every result has them."""
    return {
        name: not only
        for fields, _, only in sections("docs/json.md")[section]
        for name in re.findall("`([^`]+)`", fields)
    }


def covers(field: str, path: str) -> bool:
    """Whether a documented field is a printed one, or the object it is in."""
    return path == field or path.startswith((f"{field}.", f"{field}[]"))


@pytest.fixture(scope="module")
def results(reader: Any, run_cli: Any) -> dict[str, list[dict[str, Any]]]:
    """Results by section: of all that the pages show, and of what they do not show."""
    shown = [(entry.arguments, entry.result) for page in RUNNING for entry in reader.read(page)]
    found: dict[str, list[dict[str, Any]]] = {}
    for arguments, result in [*shown, *((words, reader.run(words)) for words in RUN_FOR_JSON)]:
        command = arguments[0]
        plain = "--dry-run" if "--dry-run" in arguments else "Commands that write a checkpoint"
        section = TASKS if command == "eval" and "models" in result else command
        found.setdefault(section if section in {*OWN, TASKS} else plain, []).append(result)
    return found


SECTIONS = [
    "--dry-run",
    "Commands that write a checkpoint",
    "eval",
    "compare",
    "generate",
    "routing",
    "bench",
    "inspect",
    "report",
    "verify",
    "push",
    "list",
    "recommend",
    "doctor",
]


def check(section: str, results: list[dict[str, Any]]) -> None:
    """Compare a section with what was printed."""
    fields = documented(section) | documented("Every result")
    paths = [set(printed(result)) for result in results]
    unknown = {path for found in paths for path in found if not any(covers(field, path) for field in fields)}
    assert unknown == set(), "printed, but not in docs/json.md"
    never = {field for field in fields if not any(covers(field, path) for found in paths for path in found)}
    assert never == set(), "in docs/json.md, but never printed"
    for field, always in fields.items():
        if always:
            assert all(any(covers(field, path) for path in found) for found in paths), f"{field} is not always there"


@pytest.mark.parametrize("section", SECTIONS)
def test_fields_are_those_that_are_printed(results, section):
    check(section, results[section])


def test_fields_of_the_demo(run_cli, monkeypatch, tmp_path):
    """What it prints, whatever its models are."""
    models = [DemoModel("dense", 1_000_000, 40.5, "trained from nothing"), DemoModel("upcycled", 7, 40.5, "upcycled")]
    monkeypatch.setattr("moetool.cli.commands.demo.run", lambda *_: models)
    check("demo", [run_cli("demo", tmp_path / "demo", "--json").json])


def test_fields_of_several_models_and_tasks(results, run_cli, documented_moe, tmp_path, monkeypatch):
    """lm-eval, which is not here, is stood for."""
    stub_tasks(monkeypatch)
    monkeypatch.setattr("moetool.cli.commands.evaluate.place_beside", lambda _: tmp_path / "scores.json")
    check(TASKS, [*results[TASKS], run_cli("eval", documented_moe, "--tasks", "one", "--json").json])


def test_every_command_has_a_section():
    tables = sections("docs/json.md")
    assert set(COMMANDS) >= OWN
    assert {*SECTIONS, TASKS, "demo", "Every result"} == set(tables)
    assert all(tables.values())
