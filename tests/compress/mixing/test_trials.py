"""Sizes to try for an increase of perplexity."""

import math
from collections.abc import Callable

import pytest
from pydantic import TypeAdapter, ValidationError

from moetool.compress.mixing.trials import MOST_TRIALS, Increase, SizeSearch
from moetool.compress.results import Trial

LEAST, LARGEST, PER_BIT = 1_000_000, 9_000_000, 1_000_000.0


def tried(most: float, increase: Callable[[float], float], error: float = 0.0) -> tuple[SizeSearch, list[Trial]]:
    """All sizes that are tried of a model that loses so much at so many bits."""
    search, trials = SizeSearch(most, LEAST, LARGEST, PER_BIT), list[Trial]()
    while (size := search.next(trials)) is not None:
        assert LEAST <= size <= LARGEST
        assert size not in {trial.bytes for trial in trials}
        trials.append(Trial(size, increase(size / PER_BIT), error))
    return search, trials


@pytest.mark.parametrize("most", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("steepness", [1.0, 1.4, 2.0, 3.0])
def test_the_smallest_that_holds(most: float, steepness: float) -> None:
    """Within a third of a bit, whether bits do more than the rule of thumb or less."""

    def increase(bits: float) -> float:
        return 2.0 * math.exp(-steepness * bits)

    search, trials = tried(most, increase)
    best = search.best(trials)
    assert best is not None
    assert len(trials) <= MOST_TRIALS
    assert best.increase <= most
    assert increase(best.bytes / PER_BIT - 0.33) > most or best.bytes == LEAST


def test_one_that_bends() -> None:
    """Far steeper at the small end, as models are: both ends come closer."""
    search, trials = tried(0.02, lambda bits: 0.3 * math.exp(-1.5 * bits) + 5 * math.exp(-4 * bits))
    best = search.best(trials)
    assert best is not None
    assert 0.016 <= best.increase <= 0.02


def test_noise_is_not_searched() -> None:
    """Not closer than the standard error tells sizes apart, and a decrease is as good as nothing."""
    exact, noisy = (tried(0.02, lambda bits: 0.3 * math.exp(-bits), error)[1] for error in (0.0, 0.02))
    assert len(noisy) < len(exact)
    search, trials = tried(0.02, lambda bits: -0.001)
    assert search.best(trials) == trials[-1]
    assert trials[-1].bytes == LEAST


def test_what_nothing_holds() -> None:
    """The largest is tried before it gives up."""
    search, trials = tried(0.02, lambda bits: 0.5)
    assert search.best(trials) is None
    assert trials[-1].bytes == LARGEST
    assert len(trials) <= MOST_TRIALS


@pytest.mark.parametrize(
    ("said", "meant"), [("2%", 0.02), (" 0.5 % ", 0.005), ("0.02", 0.02), ("150%", 1.5), (0.1, 0.1)]
)
def test_what_an_increase_is(said: object, meant: float) -> None:
    assert TypeAdapter(Increase).validate_python(said) == pytest.approx(meant)


@pytest.mark.parametrize("said", ["0%", "-1%", "2", "much", "%", "2%%", "nan%", "inf%"])
def test_what_none_is(said: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Increase).validate_python(said)
