"""The page: what is in it, and that nothing in it is taken for markup."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from html_pages import check_page

from moetool.errors import UsageError
from moetool.report import pictures
from moetool.report.page import page, page_file
from moetool.report.recorded import RecordedResults, RecordedRun
from moetool.report.results import HowMade, MadeStep, Report, TextCoverage, WeightBytes

HOSTILE = "<script>alert(1)</script>&\"'"


def report(**more: Any) -> Report:
    least: dict[str, Any] = {
        "model": HOSTILE, "output": "x.html", "model_type": HOSTILE, "bytes": 1500, "files": 1, "numbers": 700,
        "weights": [WeightBytes(kind=HOSTILE, bytes=1400)],
    }  # fmt: skip
    return Report(**{**least, **more})


def test_the_least_page() -> None:
    found = check_page(page(report()))
    assert found.headings == ["Size"]
    assert found.rows("Bytes by kind of tensor") == [[HOSTILE, "1.4 kB", "93.3%"]]


def test_everything_is_escaped() -> None:
    made = HowMade(
        steps=[MadeStep(stage=HOSTILE, source=HOSTILE, source_fingerprint=HOSTILE)],
        command=shlex.join(["moetool", HOSTILE, "--data", HOSTILE]), preset=HOSTILE,
        options={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE}, calibration={HOSTILE: HOSTILE},
    )  # fmt: skip
    runs = [
        RecordedRun(
            stage=HOSTILE, input=HOSTILE, output=HOSTILE, seconds=1, peak_memory_bytes=1,
            curve=[{"step": 1.0, HOSTILE: 2.0}, {"step": 2.0, HOSTILE: 1.0}],
        )
    ]  # fmt: skip
    coverage = [TextCoverage(text=HOSTILE, layers=[0, 1], shares=[[0, 1], [0.5, 0.5]], rare=[], unreached=1)]
    content = page(report(made=made, coverage=coverage, recorded=RecordedResults(runs=runs), notes=[HOSTILE]))
    found = check_page(content)
    assert "<script" not in content
    assert found.headings == [
        *(
            "How it was made",
            "Size",
            "Routing and coverage",
            "Training",
            "Time, memory and scratch",
            "Options and versions",
        ),
    ]


def test_curves_are_those_that_were_logged() -> None:
    curve = [{"step": 10.0, "loss": 2.5}, {"step": 20.0, "loss": 2.25}, {"step": 20.0, "eval_loss": 2.4}]
    run = RecordedRun(stage="tune", input="a", output="b", seconds=61, peak_memory_bytes=10**9, curve=curve)
    found = check_page(page(report(recorded=RecordedResults(runs=[run]))))
    assert found.rows("Training: b") == [["10", "2.5", "–"], ["20", "2.25", "–"], ["20", "–", "2.4"]]
    assert found.rows("Jobs") == [["tune", "b", "1", "61 s", "–", "1.0 GB", "–", "–", "–"]]


@pytest.mark.parametrize("stage", ["repair", "auto"])  # auto: what `compress --repair` prints
def test_curves_of_a_repair_are_divergences_in_thousandths(stage: str) -> None:
    curve = [{"step": 0.0, "wiki": 0.0123}, {"step": 20.0, "wiki": 0.0045}]
    run = RecordedRun(stage=stage, input="a", output="b", seconds=61, peak_memory_bytes=10**9, curve=curve)
    content = page(report(recorded=RecordedResults(runs=[run])))
    assert check_page(content).rows("Training: b") == [["0", "12.3"], ["20", "4.5"]]
    assert "wiki, thousandths of a nat per token" in content


def test_without_matplotlib_there_are_no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "is_there", lambda: False)
    assert check_page(page(report())).drawn == 0


def test_where_a_page_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert page_file("hub/model.v1", None) == Path("model.v1.html")
    assert page_file("small/model.gguf", None) == Path("small.html")
    assert page_file("small/other.gguf", None) == Path("other.html")
    assert page_file(".", None) == Path(f"{tmp_path.name}.html")
    (tmp_path / "folder.html").mkdir()
    for wrong in ("model.safetensors", "absent/x.html", "folder.html"):
        with pytest.raises(UsageError, match="html"):
            page_file("m", Path(wrong))
