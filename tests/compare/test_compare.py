"""`moetool compare`: what a row says, what is not made again, and what is wrong."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from moetool.calibration.sweep import Sweep
from moetool.compare import running
from moetool.job.journal import Journal
from moetool.job.progress import Progress

FEW = ("--sequence-length", 32, "--windows", 6)
CALIBRATED = ("--samples", 4, *FEW)


@pytest.fixture
def compare(run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path) -> Any:
    """`compare("d2moe", "--ratios", .4, model=…)`: the command on the tiny model and text."""

    def run(methods: str, *more: object, model: Path = tiny_mixtral, data: Path = tiny_text) -> Any:
        named = ("--methods", methods) if methods else ()
        texts = ("--calibration", tiny_text, "--mix", 0, "--data", data)
        return run_cli("compare", model, *named, *texts, *CALIBRATED, "--work", tmp_path / "work", *more, "--json")

    return run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all models that are begun."""
    names: list[str] = []
    before = running.run_stage

    def noting(kind: Any, source: Any, target: Path, *more: Any, **others: Any) -> Any:
        names.append(target.name.rpartition("-")[0])
        return before(kind, source, target, *more, **others)

    monkeypatch.setattr(running, "run_stage", noting)
    return names


def test_rows_are_what_compress_and_eval_say(compare, run_cli, tiny_mixtral, tiny_text, tmp_path):
    pytest.importorskip("matplotlib")
    table, chart = tmp_path / "table.md", tmp_path / "chart.svg"
    told = compare("ders-quantize", "--keep", "--output", table, "--plot", chart).json
    [row] = told["rows"]
    evaluated = run_cli("eval", row["path"], "--data", tiny_text, *FEW, "--against", tiny_mixtral, "--json").json
    against = evaluated["against"]
    assert {name: row[name] for name in ("excess", "excess_error", "kl", "agreement")} == pytest.approx(
        {name: against[name] for name in ("excess", "excess_error", "kl", "agreement")}
    )
    assert (row["perplexity"], told["nll"]) == pytest.approx((evaluated["perplexity"], against["nll"]))
    inspected = run_cli("inspect", row["path"], "--json").json
    assert (row["bytes"], told["bytes"]) == (inspected["bytes"], inspected["original_bytes"])
    assert row["saved"] == pytest.approx(inspected["ratio"])
    assert row["seconds"] > 0
    assert f"{row['perplexity']:.3f}" in table.read_text()
    assert "ders-quantize" in chart.read_text() or chart.stat().st_size > 1000


def test_models_go_and_rows_stay(compare, made, tmp_path, tiny_mixtral):
    """More of the same makes only what is new; another text, all of it."""
    first = compare("d2moe", "--ratios", "0.3").json
    assert made == ["d2moe-30"]
    assert [path for path in (tmp_path / "work").iterdir() if path.is_dir()] == []
    second = compare("d2moe", "--ratios", "0.3,0.2", "--models", tiny_mixtral).json
    assert made == ["d2moe-30", "d2moe-20"]
    assert second["rows"][1] == first["rows"][0]
    assert (second["rows"][0]["kl"], second["rows"][0]["saved"]) == (0, 0)
    assert [row["asked"] for row in second["rows"]] == [None, 0.3, 0.2]
    other = tmp_path / "other.txt"
    other.write_text("Something else. " * 200)
    assert compare("d2moe", "--ratios", "0.3", data=other).json["rows"][0] != first["rows"][0]
    assert made[2:] == ["d2moe-30"]


class Stopping(Progress):
    """SIGTERM at the third step."""

    steps = 0

    def advance(self) -> None:
        self.steps += 1
        if self.steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("unit", ["measured", "finished"])
def test_a_stop_that_is_asked_for_in_the_last_unit_of_a_job_is_heard(compare, made, monkeypatch, tmp_path, unit):
    """The job itself has nothing left to stop. What followed it went on, for hours."""
    note = Journal.done

    def stopping(journal: Journal, name: str, *arguments: Any, **more: Any) -> None:
        note(journal, name, *arguments, **more)
        if name == unit:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = compare("d2moe", "--ratios", "0.3,0.35").json["rows"]
    shutil.rmtree(tmp_path / "work")
    made.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "done", stopping)
        result = compare("d2moe", "--ratios", "0.3,0.35")
    assert result.code == 75
    assert "the same command goes on" in result.stderr
    assert len(made) == (1 if unit == "finished" else 0)
    rows = compare("d2moe", "--ratios", "0.3,0.35").json["rows"]
    assert [row["kl"] for row in rows] == [row["kl"] for row in whole]


def test_stopped_while_a_model_is_made_it_goes_on_there(compare, made, monkeypatch, tmp_path):
    noting = running.run_stage

    def stopped(*arguments: Any, progress: Any, **more: Any) -> Any:
        return noting(*arguments, progress=Stopping(), **more)

    with monkeypatch.context() as patch:
        patch.setattr(running, "run_stage", stopped)
        result = compare("ders-quantize")
    assert result.code == 75
    assert "the same command goes on" in result.stderr
    [left] = [path for path in (tmp_path / "work").iterdir() if path.is_dir()]
    [row] = compare("ders-quantize").json["rows"]
    assert made == ["ders-quantize"] * 2
    assert not left.exists()
    assert "seconds" not in row
    shutil.rmtree(tmp_path / "work")
    assert compare("ders-quantize").json["rows"][0]["kl"] == row["kl"]


CHEAP = ("--option", "hybrid:group_size=16", "--option", "auto:group_size=16", "--option", "quantize:group_size=16")


def files(directory: str) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in Path(directory).rglob("*")
        if path.is_file() and path.name != "costs.json"
    }


@pytest.mark.parametrize(
    ("methods", "ratios", "options", "passes"),
    [
        ("hybrid,auto,quantize", "0.5", CHEAP, [["hybrid at 50.0%", "auto at 50.0%", "quantize at 50.0%"]]),
        ("d2moe,two=d2moe", "0.4,0.3", ("--option", "two:rank=3"), [["d2moe at 40.0%", "d2moe at 30.0%", "two"]]),
        pytest.param(
            "hybrid", "0.6,0.4", (*CHEAP, "--option", "hybrid:refine=4", "--option", "hybrid:rotate=true"),
            [["hybrid at 60.0%", "hybrid at 40.0%"]], marks=pytest.mark.exhaustive,
        ),
        ("d2moe,two=d2moe", "0.4", ("--option", "two:merge=mean"), []),
    ],
    ids=["mixing", "d2moe", "refined and rotated", "apart"],
)  # fmt: skip
def test_one_statistics_pass_for_several(
    compare, run_cli, tiny_mixtral, tiny_text, tmp_path, monkeypatch, methods, ratios, options, passes
):
    """Rows are to the last byte what `compress` makes by itself."""
    swept: list[int] = []
    before = Sweep.backward
    monkeypatch.setattr(Sweep, "backward", lambda *arguments: (swept.append(1), before(*arguments))[1])
    options = [said for said in options if said != "--option" and said.partition(":")[0] in methods]
    given = ("--ratios", ratios, "--keep", *(word for said in options for word in ("--option", said)))
    told = compare(methods, *given).json
    assert [shared["rows"] for shared in told.get("statistics", [])] == passes
    assert len(swept) == 3 * (len(passes) or len(told["rows"]))  # layers
    assert len([path for path in (tmp_path / "work").iterdir() if path.is_dir()]) == len(told["rows"])
    assert compare(methods, *given).json == told
    if passes:
        row = told["rows"][-1]
        own = [words for said in options for words in option(row["name"], said)]
        asked = ("--ratio", row["asked"]) if row.get("asked") else ()
        texts = ("--calibration", tiny_text, "--mix", 0, "--samples", 4, "--sequence-length", 32)
        result = run_cli(
            "compress", tiny_mixtral, tmp_path / "by-itself", "--method", row["method"], *asked, *texts, *own
        )
        assert result.code == 0, result.stderr
        assert files(tmp_path / "by-itself") == files(row["path"])


def option(row: str, said: str) -> list[str]:
    """`hybrid:group_size=16` as `compress` takes it, if it is that row's."""
    name, _, given = said.partition(":")
    key, _, value = given.partition("=")
    flag = f"--{key.replace('_', '-')}"
    return [] if name != row else [flag] if value == "true" else [flag, value]


def test_killed_while_it_evaluates_no_model_is_made_again(compare, made, tiny_mixtral, monkeypatch):
    """What killing the process would leave: the model, and the line that it is there."""

    def killed(path: str, *_: Any) -> Any:
        raise KeyboardInterrupt

    compare("", "--models", tiny_mixtral)  # the original is evaluated
    with monkeypatch.context() as patch:
        patch.setattr(running, "perplexity", killed)
        result = compare("ders-quantize")
    assert result.code == 130  # a script that starts it again after 75 ends at Ctrl-C
    assert "interrupted: Stopped. What is done" in result.stderr
    assert "the same command goes on" in result.stderr
    [row] = compare("ders-quantize").json["rows"]
    assert row["seconds"] > 0
    assert made == ["ders-quantize"] * 2  # the second finds it finished


def test_what_cannot_be_made_is_a_row(compare, tiny_mixtral, make_mixtral, save_model, tmp_path):
    larger = save_model(make_mixtral(vocab_size=300), tmp_path / "larger")
    result = compare("d2moe,ders-quantize", "--ratios", "0.99", "--models", f"/no/model,{larger}")
    missing, other, impossible, possible = result.json["rows"]
    assert "/no/model" in missing["error"]
    assert "different vocabularies" in other["error"]
    assert "0.99 is not possible" in impossible["error"]
    assert "error" not in possible
    assert "0.99 is not possible" in result.stderr


def test_a_method_with_other_options_has_a_row_of_its_own(compare):
    more = ("--option", "two:bits=2", "--option", "two:group-size=16")
    four, two = compare("ders-quantize,two=ders-quantize", *more).json["rows"]
    assert (two["name"], two["method"]) == ("two", "ders-quantize")
    assert two["bytes"] != four["bytes"]
    assert two["kl"] > four["kl"]


@pytest.mark.parametrize(
    ("methods", "more", "words"),
    [
        ("hybird", (), "Did you mean hybrid?"),
        ("d2moe,d2moe", (), "a name of its own"),
        ("d2moe", ("--ratios", "1.5"), "--ratios"),
        ("d2moe", ("--ratios", "much"), "--ratios"),
        ("d2moe", ("--option", "hybrid:base_bits=3"), "--methods has d2moe"),
        ("hybrid", ("--ratios", 0.5, "--option", "hybrid:base_bit=3"), "Did you mean base_bits?"),
        ("hybrid", ("--option", "hybrid:base_bits"), "NAME:OPTION=VALUE"),
        ("hybrid", (), "hybrid needs a size: give --ratios 0.4,0.6 or --option hybrid:size=…."),
        ("hybrid", ("--ratios", 0.5, "--option", "hybrid:base_bits=99"), "error: hybrid: --base-bits 99: "),
        ("", ("--models", "one,one"), "--models names one twice"),
        ("", (), "Nothing to compare"),
    ],
)
def test_what_is_refused(compare, methods, more, words):
    result = compare(methods, *more)
    assert result.code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_folder_with_something_else_is_left_alone(compare, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine.txt").write_text("mine")
    result = compare("ders-quantize")
    assert result.code == 2
    assert "holds no comparison" in result.stderr
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mine.txt"]


def test_a_torn_line_is_made_again(compare, made, tmp_path):
    first = compare("ders-quantize").json
    journal = tmp_path / "work" / "journal.jsonl"
    content = journal.read_text()
    journal.write_text(content[: len(content) - 40])
    again = compare("ders-quantize").json
    assert again["rows"][0]["kl"] == first["rows"][0]["kl"]
    assert json.loads(journal.read_text().splitlines()[-1])["told"]["kl"] == first["rows"][0]["kl"]
    assert made == ["ders-quantize"] * 2


def test_where_nothing_could_be_made_it_fails(compare):
    refused = compare("hybrid,reap", "--ratios", "0.999")
    assert refused.code == 2
    assert "None of these models can be made or read" in refused.stderr
    assert "hybrid at 99.9%: --ratio 0.999 is not possible here" in refused.stderr
    assert "reap at 99.9%: --ratio 0.999 cannot be met" in refused.stderr
    assert "Evaluate" not in refused.stderr, "the original is not measured for nothing"


def test_models_that_cannot_be_compared_are_told_before_the_original_is_measured(compare, tmp_path):
    refused = compare("", "--models", tmp_path / "none")
    assert refused.code == 2
    assert "none: " in refused.stderr
    assert "Evaluate" not in refused.stderr


def test_one_row_that_cannot_be_leaves_the_others(compare):
    found = compare("ders-quantize,hybrid", "--ratios", "0.999")
    assert found.code == 0, found.stderr
    made, refused = found.json["rows"]
    assert made["kl"] is not None
    assert "is not possible here" in refused["error"]
