"""Help, completion and slips are answered from a table, and the table says what the commands say."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moetool.cli.app import FILE, front, imported, offered, offered_presets, table
from moetool.cli.choosing import CHOICES
from moetool.cli.command import HintingCommand, from_record, to_record
from moetool.cli.names import commands

HEAVY = ("torch", "transformers", "datasets", "numpy")
_RUN = """
import json, sys
sys.argv = ["moetool", *sys.argv[1:]]
from moetool.cli import main
try:
    main()
finally:
    print(json.dumps([name for name in {heavy} if name in sys.modules]), file=sys.__stderr__)
"""


def help_of(command: HintingCommand, name: str) -> Any:
    return command.get_help(command.make_context(name, [], resilient_parsing=True))


def script() -> Any:
    path = Path(__file__).parents[2] / "scripts" / "docs" / "options.py"
    spec = importlib.util.spec_from_file_location("options_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_what_the_commands_say() -> None:
    assert script().front_table() == FILE.read_text(encoding="utf-8"), "run `make docs`"


@pytest.mark.parametrize("name", commands())
def test_help_is_the_commands_own(name: str) -> None:
    for form in table()["forms"][name]:
        arguments = [f"--{CHOICES[name][0]}", form] if form else []
        assert help_of(front(name, arguments), name) == help_of(imported(name, arguments), name)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("compress", "--help"), 0, "--ratio"),
        (("compress", "--method", "hybrid", "--help"), 0, "--trellis"),
        (("compress", "--preset", "hybrid-75", "--help"), 0, "--trellis"),
        (("compress", "a", "b", "--ratoi", "0.4"), 2, "Did you mean --ratio?"),
        (("compress", "a", "b", "--method", "hybird"), 2, "Did you mean hybrid?"),
        (("upcycle", "a", "b", "--rank", "3"), 2, "It exists with --method ders-lowrank."),
        (("compress", "a"), 2, "OUTPUT"),
        (("eval", "a", "--windows", "many"), 2, "--windows"),
        (("list", "methds"), 2, "Did you mean methods?"),
        (("compress", "./none", "b", "--ratio", "0.4"), 3, "No such directory: ./none."),
        (("eval", "a", "/no/ne"), 3, "No such directory: /no/ne."),
        (("repair", "a/b", "c", "--to", "../none"), 3, "No such directory: ../none."),
        (("chat", "none.gguf"), 3, "No such file: none.gguf."),
    ],
)
def test_nothing_heavy_is_imported_for_them(arguments: tuple[str, ...], code: int, said: str) -> None:
    command = [sys.executable, "-c", _RUN.format(heavy=HEAVY), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    *output, imports = (run.stdout + run.stderr).strip().splitlines()
    assert run.returncode == code, run.stderr
    assert said in " ".join(output)
    assert json.loads(imports) == []


def test_transformers_and_the_compiler_are_imported_for_a_model_alone() -> None:
    """Options of all stages are known without them: together they take longer than all else at the start."""
    heavy = ("transformers", "datasets", "scipy", "torch._dynamo")
    command = [
        sys.executable,
        "-c",
        _RUN.format(heavy=heavy),
        "compress",
        "no-such",
        "out",
        "--ratio",
        "40%",
        "--dry-run",
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 3
    assert json.loads(run.stderr.splitlines()[-1]) == []


def test_every_parameter_goes_there_and_back() -> None:
    for record in table()["parameters"]:
        if record["name"] in ("method", "format"):
            record = record | {"default": "of the command line"}
        assert to_record(from_record(record)) == record


def test_a_stage_whose_file_is_new_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    known = table()
    forms = known["forms"] | {"compress": {"d2moe": known["forms"]["compress"]["d2moe"]}}
    monkeypatch.setattr("moetool.cli.app.table", lambda: known | {"forms": forms})
    assert "--trellis" in help_of(front("compress", ["--method", "hybrid"]), "compress")
    forms.pop("eval")
    assert "--data" in help_of(front("eval", []), "eval")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("moetool mo", ["moefy"]),
        ("moetool compress model out --method d", ["d2moe", "ders-quantize", "ders-sparsify", "drop-experts"]),
        ("moetool compress --method hybrid --preset hybrid-7", ["hybrid-70", "hybrid-75", "hybrid-75-best"]),
        ("moetool compress --method ders-quantize --base-b", ["--base-bits"]),
        ("moetool upcycle model out --target qwen2", ["qwen2_moe"]),
        ("moetool compare model --methods hybrid,qu", ["hybrid,quantize"]),
        ("moetool tune model out --preset tune-si", ["tune-simoe"]),
    ],
)
def test_a_shell_is_told(run_cli: Any, monkeypatch: pytest.MonkeyPatch, line: str, expected: list[str]) -> None:
    """Bash asks by these variables, and is answered with a word per line."""
    state = {"_MOETOOL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    for name, value in state.items():
        monkeypatch.setenv(name, value)
    result = run_cli()
    assert result.code == 0, result.stderr
    assert result.stdout.split() == expected


def test_names_after_the_last_comma() -> None:
    offer = offered(lambda: ["one", "other", "two"])
    assert offer("o") == ["one", "other"]
    assert offer("two,o") == ["two,one", "two,other"]
    assert offer("x") == []


def test_presets_of_a_method() -> None:
    assert "hybrid-75" in offered_presets("compress", "hybrid")("")
    assert "hybrid-75" not in offered_presets("compress", "d2moe")("")
