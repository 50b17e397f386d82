"""How much smaller a model can be before its perplexity grows by more than was allowed: sizes to try, one by one.

What forms are estimated to lose tells them apart, and not what perplexity will be, so sizes are tried and measured. The
logarithm of the increase falls about evenly with the bits of every number, by ln 4 for each: half the step of a
quantizer is a quarter of its squared error. Once a size holds and a smaller one does not, a secant lies between them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field

from moetool.compress.told import Trial

MOST_TRIALS = 6
_CLOSE = 0.01  # of the size: nearer than that to one that is too small, nothing is gained
_ENOUGH = 0.95  # of the increase that is allowed,
_ENOUGH_ERROR = 0.5  # or half of it, if that is as near as so much of its standard error
_LEAST_SHARE = 1e-3  # of the increase that is allowed: less, or a decrease, counts as that
_PER_BIT = math.log(4)


def _share(value: object) -> object:
    """`"2%"` → 0.02; a number is a share already."""
    if not isinstance(value, str):
        return value
    number, percent, rest = value.strip().partition("%")
    try:
        found = float(number + rest)
    except ValueError as error:
        raise ValueError(f"'{value}' is no increase; write it like 2% or 0.02") from error
    if not percent and found >= 1:
        raise ValueError(f"'{value}' would be {100 * found:g} %; if that is meant, write {100 * found:g}%")
    return found / 100 if percent else found


Increase = Annotated[float, BeforeValidator(_share), Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class SizeSearch:
    """Which size to try next.

    Attributes:
        most: increase that is allowed.
        least, largest: sizes that there are, in bytes.
        per_bit: bytes that one bit more for every number of the experts takes.
    """

    most: float
    least: int
    largest: int
    per_bit: float

    def best(self, trials: Sequence[Trial]) -> Trial | None:
        """The smallest that holds."""
        return min((trial for trial in trials if trial.increase <= self.most), key=lambda own: own.bytes, default=None)

    def next(self, trials: Sequence[Trial]) -> int | None:
        """The size to try after these; `None` if there is nothing to gain, or there were enough."""
        found = self._next(trials) if trials else min(self.largest, round(self.least + 2 * self.per_bit))
        return None if found is None or found in {trial.bytes for trial in trials} else found

    def _next(self, trials: Sequence[Trial]) -> int | None:
        best = self.best(trials)
        failed = [trial for trial in trials if best is None or trial.bytes < best.bytes]
        below = max((trial for trial in failed if trial != best), key=lambda own: own.bytes, default=None)
        if best is None:
            assert below is not None
            if len(trials) >= MOST_TRIALS // 2:
                return self.largest
            return min(self.largest, round(below.bytes + self.per_bit * max(self._bits(below), 0.25)))
        told_apart = max(self.most / 2, self.most - _ENOUGH_ERROR * best.increase_error)
        enough = min(_ENOUGH * self.most, told_apart)
        if len(trials) >= MOST_TRIALS or best.bytes <= self.least or best.increase >= enough:
            return None
        if below is None:
            return max(self.least, round(best.bytes + self.per_bit * min(max(self._bits(best), -2.0), -0.125)))
        gap = best.bytes - below.bytes
        if gap <= _CLOSE * best.bytes:
            return None
        over, under = self._excess(below), -self._excess(best)
        # As in the Illinois method: an end that stays counts for half each time, so that both ends come closer.
        held = [trial.increase <= self.most for trial in trials]
        again = next((count for count, own in enumerate(reversed(held)) if own != held[-1]), len(held)) - 1
        over, under = (over / 2**again, under) if held[-1] else (over, under / 2**again)
        return below.bytes + round(gap * min(max(over / (over + under), 0.1), 0.9))

    def _bits(self, trial: Trial) -> float:
        """Of every number, that a model is to have more (or less, if negative) by rule of thumb."""
        return self._excess(trial) / _PER_BIT

    def _excess(self, trial: Trial) -> float:
        """Logarithm of the increase over what is allowed."""
        return math.log(max(trial.increase / self.most, _LEAST_SHARE))
