"""Options that are given more than once: lists join, any other value may not change."""

from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from typer.testing import CliRunner

from moetool.cli.app import app, front, table
from moetool.cli.choosing import CHOICES
from moetool.cli.command import from_record
from moetool.cli.generate import build_options
from moetool.compare.candidates import candidates
from moetool.compare.options import CompareOptions
from moetool.compress.methods.auto import AutoOptions
from moetool.errors import UsageError
from moetool.measure.analysis import AnalysisOptions
from moetool.report.options import ReportOptions


def parsed(command: str, *arguments: str) -> dict[str, Any]:
    built = front(command, arguments)
    with built.make_context(command, list(arguments)) as context:
        return dict(context.params)


def test_lists_join() -> None:
    typed = parsed("compress", "a", "b", "--include", "attention", "--include", "embeddings:6,attention")
    assert typed["include"] == ["attention", "embeddings:6,attention"]
    asked = {"ratio": "0.4", "include": typed["include"]}
    assert build_options(AutoOptions, asked).include == ("attention", "embeddings:6")


@pytest.mark.parametrize("given", [["one.txt", "two.txt@2"], ["one.txt,two.txt@2"]])
def test_texts_join(given: list[str]) -> None:
    typed = parsed("compress", "a", "b", *(word for text in given for word in ("--calibration", text)))
    assert typed["calibration"] == given
    options = build_options(AutoOptions, {"ratio": "0.4", "calibration": given})
    assert options.calibration == "one.txt,two.txt@2"
    assert build_options(AutoOptions, {}, {"ratio": 0.4, "calibration": given}) == options  # of a preset


def test_layers_and_results_join() -> None:
    assert build_options(AnalysisOptions, {"layers": ["4", "0,2"]}).layers == (0, 2, 4)
    assert build_options(ReportOptions, {"results": ["a.json", "b.json,c.json"]}).results == (
        "a.json",
        "b.json",
        "c.json",
    )


def test_whatever_takes_commas_is_a_list() -> None:
    for record in table()["parameters"]:
        if record.get("argument") or not any(
            said in record["help"] for said in ("with commas", "with a comma", "several times", "0,4,8", "several get")
        ):
            continue
        kind = get_args(from_record(record).annotation)[0]
        assert list in map(get_origin, (kind, *get_args(kind))), record["name"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compress", "a", "b", "--ratio", "0.4", "--ratio=0.5"), "--ratio is given twice, as 0.4 and as 0.5"),
        (("compress", "a", "b", "--method", "hybrid", "--method", "d2moe"), "--method is given twice, as hybrid and"),
        (("compress", "a", "b", "--proof", "--no-proof"), "--proof and --no-proof exclude each other"),
        (("compress", "a", "b", "--log-json", "x", "--log-json", "y"), "--log-json is given twice, as x and as y"),
        (("eval", "a", "--windows", "8", "--windows", "9", "--windows", "9"), "--windows is given twice, as 8 and"),
        (("export", "a", "b", "--format", "gguf", "--type", "Q8_0", "--type", "Q4_0"), "--type is given twice"),
        (("compare", "a", "--data", "x", "--work", "one", "--work", "two"), "--work is given twice, as one and as two"),
    ],
)
def test_two_values_of_one_option_are_refused(arguments: tuple[str, ...], said: str) -> None:
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 2
    assert said in " ".join(ended.output.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compress", "a", ""), "OUTPUT is empty"),
        (("compress", "a", "b", "--log-json", ""), "--log-json is empty"),
        (("compare", "a", "--data", "x", "--work="), "--work is empty"),
    ],
)
def test_an_empty_path_is_refused(arguments: tuple[str, ...], said: str) -> None:
    """As of a shell's variable that is not set; it would be the folder that the command is typed in."""
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 2
    assert said in " ".join(ended.output.split())


def test_one_value_may_be_given_twice() -> None:
    words = ("--seed", "3", "--overwrite", "--seed", "3", "--overwrite", "--log-json", "x", "--log-json", "x")
    typed = parsed("compress", "a", "b", *words)
    assert (typed["seed"], typed["overwrite"], typed["log_json"]) == (3, True, Path("x"))


@pytest.mark.parametrize("command", table()["forms"])
def test_no_command_takes_two_values(command: str) -> None:
    """Of an option with one value the last would count, and nobody would be told."""
    for form in table()["forms"][command]:
        chosen = (f"--{CHOICES[command][0]}", form) if form else ()
        built = front(command, chosen)
        for option in built.params:
            own: Any = option
            if own.param_type_name != "option" or own.multiple or (chosen and own.opts[0] == chosen[0]):
                continue
            words = [own.opts[0], *own.secondary_opts] if own.is_flag else [own.opts[0], "1", own.opts[0], "2"]
            if own.is_flag and not own.secondary_opts:
                continue
            with pytest.raises(Exception, match=r"is given twice|exclude each other"):
                front(command, chosen).make_context(command, [*chosen, *words])


def test_options_of_a_row_are_not_given_twice() -> None:
    def compared(*words: str) -> CompareOptions:
        return build_options(CompareOptions, {"data": "x", "methods": ["d2moe"], "ratios": ["0.4"], "option": [*words]})

    assert candidates(compared("d2moe:seed=2", "d2moe:seed=2"), build_options)[0].options.model_dump()["seed"] == 2
    with pytest.raises(UsageError, match="d2moe has this option already, with another value"):
        candidates(compared("d2moe:seed=2", "d2moe:seed=3"), build_options)
