"""How long a job has still to go, corrected by how long it has taken."""

import pytest

from moetool.job.forecast import Forecast, format_seconds
from moetool.job.result import PhaseTime


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def forecast(clock: Clock) -> Forecast:
    return Forecast([PhaseTime("Forward", 100), PhaseTime("Backward", 200), PhaseTime("Write", 50)], clock)


def run(forecast: Forecast, clock: Clock, phase: str, seconds: float, steps: int = 10) -> None:
    forecast.start(phase, steps)
    for _ in range(steps):
        clock.now += seconds / steps
        forecast.advance()
    forecast.finish()


def test_as_predicted(forecast: Forecast, clock: Clock) -> None:
    assert forecast.seconds_left == 350
    forecast.start("Forward", 4)
    assert forecast.seconds_left == 350
    clock.now += 25
    forecast.advance()
    assert forecast.seconds_left == pytest.approx(325)
    clock.now += 10  # into the next step
    assert forecast.seconds_left == pytest.approx(315)


def test_a_step_that_takes_long_leaves_the_others(forecast: Forecast, clock: Clock) -> None:
    """A layer is coded in one step, as a batch goes through a layer in one: the others do not get shorter by it."""
    forecast.start("Forward", 4)
    clock.now += 25
    forecast.advance()
    clock.now += 60
    assert forecast.seconds_left == pytest.approx(300)


def test_twice_as_slow(forecast: Forecast, clock: Clock) -> None:
    run(forecast, clock, "Forward", 200)
    assert 2 * 250 * 0.9 < (forecast.seconds_left or 0) < 2 * 250
    forecast.start("Backward", 10)
    for _ in range(5):
        clock.now += 40
        forecast.advance()
    assert forecast.seconds_left == pytest.approx(2 * 150, rel=0.05)


def test_a_phase_goes_on_as_it_went(forecast: Forecast, clock: Clock) -> None:
    """What it takes longer says little of the next."""
    run(forecast, clock, "Forward", 100)
    forecast.start("Backward", 10)
    for _ in range(9):
        clock.now += 20
        forecast.advance()
    forecast.finish()
    forecast.start("Write", 10)
    for _ in range(5):
        clock.now += 50
        forecast.advance()
    assert forecast.seconds_left == pytest.approx(5 * 50, rel=0.1)


def test_what_had_been_done_before_is_neither_left_nor_evidence(forecast: Forecast, clock: Clock) -> None:
    forecast.start("Forward", 10)
    forecast.skip(10)
    forecast.finish()
    assert forecast.seconds_left == pytest.approx(250)
    forecast.start("Backward", 10)
    forecast.skip(6)
    assert forecast.seconds_left == pytest.approx(80 + 50)
    clock.now += 20
    forecast.advance()
    assert forecast.seconds_left == pytest.approx(60 + 50)


def test_phases_that_were_not_predicted(forecast: Forecast, clock: Clock) -> None:
    run(forecast, clock, "Check", 500)
    assert forecast.seconds_left == pytest.approx(350)
    run(forecast, clock, "Forward", 100)
    assert forecast.seconds_left == pytest.approx(250)


def test_phases_that_never_come(forecast: Forecast, clock: Clock) -> None:
    run(forecast, clock, "Forward", 100)
    forecast.start("Write", 5)
    assert forecast.seconds_left == pytest.approx(50)


def test_the_end(forecast: Forecast, clock: Clock) -> None:
    run(forecast, clock, "Write", 50)
    assert forecast.seconds_left is None
    assert Forecast([], clock).seconds_left is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "1 s"), (40, "40 s"), (130, "2 min"), (3599, "1 h"), (12_000, "3 h 20 min"), (3600 * 30, "30 h"),
     (86400 * 3 + 7200, "3 days 2 h")],
)  # fmt: skip
def test_in_words(seconds: float, said: str) -> None:
    assert format_seconds(seconds) == said
