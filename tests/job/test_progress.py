"""Progress that is timed on its way."""

from moetool.job.progress import Silent, Stopwatch, phase


def test_a_phase_that_comes_again_adds_to_the_first() -> None:
    now = [0.0]
    watch = Stopwatch(Silent(), lambda: now[0])
    for name, seconds in (("Check", 1.0), ("Write", 2.5), ("Check", 0.25)):
        with phase(watch, name, 1):
            now[0] += seconds
        now[0] += 10  # between phases
    assert list(watch.seconds.items()) == [("Check", 1.25), ("Write", 2.5)]


def test_a_phase_that_fails_is_timed_too() -> None:
    now = [0.0]
    watch = Stopwatch(Silent(), lambda: now[0])
    try:
        with phase(watch, "Write", 1):
            now[0] += 3
            raise RuntimeError
    except RuntimeError:
        pass
    assert watch.seconds == {"Write": 3.0}
