"""What a job tells while it runs."""

import pytest

from moetool.cli.display import Display
from moetool.job.result import PhaseTime


def told(capsys: pytest.CaptureFixture[str], seconds: float | None) -> str:
    display = Display()
    if seconds is not None:
        display.expect([PhaseTime("Forward", seconds), PhaseTime("Write", seconds)])
    display.start("Forward", 4)
    display.skip(1)
    for _ in range(3):
        display.advance()
    display.finish()
    return capsys.readouterr().err


def test_a_log_has_a_line_where_a_phase_begins(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, 6000).splitlines()
    assert said == ["Forward: begins, about 3 h 20 min left in all", "Forward: done in 0 s"]


def test_short_jobs_are_not_worth_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, 5) == told(capsys, None) == "Forward: done in 0 s\n"
