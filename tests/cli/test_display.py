"""What a job tells while it runs."""

import json
import math

import pytest

from moetool.cli.display import Display, print_json, print_table
from moetool.job.progress import phase
from moetool.job.result import PhaseTime


def told(capsys: pytest.CaptureFixture[str], seconds: float | None) -> str:
    display = Display()
    if seconds is not None:
        display.expect([PhaseTime("Forward", seconds), PhaseTime("Write", seconds)])
    display.start("Forward", 4, "layers")
    display.skip(1)
    for _ in range(3):
        display.advance()
    display.finish()
    return capsys.readouterr().err


def test_a_log_has_a_line_where_a_phase_begins(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, 6000).splitlines()
    assert said == ["Forward (4 layers): begins, about 3 h 20 min left in all", "Forward: done in 0 s"]


def test_infinity_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Other readers of JSON than Python's refuse `Infinity` and `NaN`."""
    print_json({"perplexity": math.inf, "models": [{"nll": math.nan, "windows": 1}]})
    found = json.loads(capsys.readouterr().out)
    assert found == {"schema_version": 1, "perplexity": None, "models": [{"nll": None, "windows": 1}]}


def test_a_title_is_one_line_over_the_narrowest_table(capsys: pytest.CaptureFixture[str]) -> None:
    title = "Overlap of experts"
    print_table(("a", "b"), [("0", "1")], title=title)
    assert capsys.readouterr().out.splitlines()[0] == title


def test_short_jobs_are_not_worth_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, 5) == told(capsys, None) == "Forward: done in 0 s\n"


def test_a_phase_that_is_stopped_says_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar on a terminal stays where it was; neither says that it is done."""
    for is_terminal in (False, True):
        if is_terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
            monkeypatch.setenv("TTY_COMPATIBLE", "1")
            monkeypatch.setenv("COLUMNS", "100")
        display = Display()
        assert display._console.is_terminal == is_terminal
        with pytest.raises(KeyboardInterrupt), phase(display, "Backward", 320, "windows"):  # noqa: PT012
            for _ in range(203):
                display.advance()
            raise KeyboardInterrupt
        said = capsys.readouterr().err
        assert said.splitlines()[-1].endswith("Backward: stopped at 203 of 320 windows after 0 s")
        assert "done" not in said
        assert ("203/320 windows" in said) == is_terminal
        assert "320/320" not in said
