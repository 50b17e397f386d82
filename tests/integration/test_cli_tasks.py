"""`moetool eval` of several models, and on tasks; their answers are canned, test_lm_eval.py asks lm-eval itself."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import copy_of
from stub_tasks import stub_tasks

from moetool.measure.tasks.options import GROUPS, TaskOptions

TEXT = ("--sequence-length", "32", "--windows", "2")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[TaskOptions]:
    return stub_tasks(monkeypatch)


@pytest.fixture
def model(tiny_mixtral: Path, tmp_path: Path) -> Path:
    return copy_of(tiny_mixtral, tmp_path / "model")


def test_models_side_by_side(run_cli: Any, small: Path, model: Path, asked: list[TaskOptions]) -> None:
    result = run_cli(
        "eval", model, small, "--tasks", "one,two", "--few-shot", "3", "--limit", "7", "--output", "x.json"
    )
    Path("x.json").unlink()
    assert result.code == 0, result.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    half, third = "0.5000 ± 0.1000", "0.3333 ± 0.2000"
    assert rows == [
        ["one", "7", "3", "acc", half, half],
        ["one", "7", "3", "bleu, remove_space", "0.2500", "0.2500"],
        ["two", "7", "3", "acc", third, third],
        ["two", "7", "3", "bleu, remove_space", "0.2500", "0.2500"],
    ]
    assert len(asked) == 2


def test_the_seven_and_their_mean(run_cli: Any, model: Path, asked: list[TaskOptions]) -> None:
    (found,) = run_cli("eval", model, "--tasks", "commonsense", "--json").json["models"]
    accuracies = [score for score in found["tasks"]["scores"] if score["metric"] == "acc"]
    assert [score["task"] for score in accuracies] == [*GROUPS["commonsense"], "commonsense"]
    assert "questions" in accuracies[-1]
    assert "mean of commonsense" in run_cli("eval", model, "--tasks", "commonsense").stdout


def test_results_are_saved_beside_the_model_and_never_over_others(
    run_cli: Any, model: Path, asked: list[TaskOptions]
) -> None:
    first = model.with_name("model.eval.json")
    result = run_cli("eval", model, "--tasks", "one", "--json")
    assert result.json["models"][0]["saved"] == str(first)
    saved = json.loads(first.read_text())
    assert saved["models"][0]["tasks"] == result.json["models"][0]["tasks"]
    before = first.read_bytes()
    assert f"saved  {model.with_name('model.eval-2.json')}" in run_cli("eval", model, "--tasks", "two").stdout
    assert first.read_bytes() == before
    assert sorted(path.name for path in model.parent.glob("*.json*")) == ["model.eval-2.json", "model.eval.json"]


def test_output_is_another_place_and_must_be_new(
    run_cli: Any, model: Path, tmp_path: Path, asked: list[TaskOptions]
) -> None:
    output = tmp_path / "results.json"
    result = run_cli("eval", model, "--tasks", "one", "--output", output, "--json")
    assert json.loads(output.read_text()) == result.json
    assert not list(tmp_path.glob("*.eval*.json"))
    for place in (output, tmp_path / "nowhere" / "results.json", tmp_path):
        assert run_cli("eval", model, "--tasks", "one", "--output", place).code == 2
    assert len(asked) == 1


def test_several_models_on_a_text(run_cli: Any, small: Path, model: Path, tiny_text: Path) -> None:
    text = ("--data", tiny_text, *TEXT)
    single = [run_cli("eval", path, *text, "--json").json for path in (model, small)]
    both = run_cli("eval", model, small, *text, "--json").json
    assert [found["text"]["nll"] for found in both["models"]] == [found["nll"] for found in single]
    assert [{"schema_version", *found["text"]} for found in both["models"]] == [set(found) for found in single]
    table = run_cli("eval", model, small, *text, "--against", model).stdout
    assert all(f"{found['perplexity']:.4f}" in table for found in single)
    assert all(word in table for word in ("excess", "KL", "top-1"))


def test_text_and_tasks_together(run_cli: Any, model: Path, tiny_text: Path, asked: list[TaskOptions]) -> None:
    (found,) = run_cli("eval", model, "--data", tiny_text, *TEXT, "--tasks", "one", "--json").json["models"]
    assert found["text"]["windows"] == 2
    assert found["tasks"]["scores"][0]["value"] == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--few-shot", "2"], "--few-shot is of tasks"),
        (["--tasks", "one", "--windows", "2"], "--windows is of a text"),
        ([], "--data is required"),
        (["--tasks", "one,,two"], "--tasks"),
        (["--tasks", "one", "--batch-size", "0"], "--batch-size 0"),
    ],
)
def test_what_does_not_fit_together(
    run_cli: Any, model: Path, asked: list[TaskOptions], options: list[str], said: str
) -> None:
    result = run_cli("eval", model, *options)
    assert result.code == 2
    assert said in result.stderr
    assert not asked


def test_without_lm_eval_it_says_how_to_get_it(run_cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("moetool.measure.loading.load_model", lambda *_: pytest.fail("a model was loaded"))
    result = run_cli("eval", model, "--tasks", "piqa")
    assert result.code == 2
    assert "pip install 'moetool[tasks]'" in result.stderr
