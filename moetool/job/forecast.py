"""Remaining time of a running job: its estimate, corrected by the time that it has taken so far."""

import time
from collections.abc import Callable, Sequence

from moetool.job.result import PhaseTime

# A prediction counts as much as this share of its job, or of its phase, done in the very time that it says.
_TRUST = 0.05


class Forecast:
    """Seconds that a job has left, by the calls that its `Progress` gets, too.

    What an earlier run had done is neither left nor evidence. Phases that were not predicted are waited for; those that
    were, and never come, are over when a later one begins.
    """

    def __init__(self, phases: Sequence[PhaseTime], clock: Callable[[], float] = time.monotonic) -> None:
        self._phases, self._clock = phases, clock
        self._next = 0  # the first phase that has not begun
        self._own = 0.0  # seconds predicted for the phase at work
        self._total, self._done, self._skipped = 1, 0, 0  # its steps
        self._began = self._stepped = clock()
        self._taken = self._predicted = 0.0  # seconds of all finished work, and what was predicted for it

    def start(self, phase: str, total: int) -> None:
        """Record that a phase of `total` steps has begun, and find its predicted time by its name."""
        later = [index for index in range(self._next, len(self._phases)) if self._phases[index].name == phase]
        self._own = 0.0
        if later:
            self._own, self._next = self._phases[later[0]].seconds, later[0] + 1
        self._total, self._done, self._skipped = max(1, total), 0, 0
        self._began = self._stepped = self._clock()

    def advance(self) -> None:
        """Record that a step of the current phase is done."""
        self._done += 1
        self._stepped = self._clock()

    def skip(self, steps: int) -> None:
        """Record that an earlier run has done so many steps of the phase, which cost no time in this one."""
        self._skipped += steps

    def finish(self) -> None:
        """Record that the current phase has ended, so that its time corrects the prediction of later ones."""
        if self._own:
            self._taken += self._clock() - self._began
            self._predicted += self._own * max(0.0, 1 - self._skipped / self._total)
        self._own = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds left of the whole job; `None` if nothing was predicted, or all of it is over."""
        if not self._own and self._next >= len(self._phases):
            return None
        whole = sum(phase.seconds for phase in self._phases)
        to_come = sum(phase.seconds for phase in self._phases[self._next :])
        step = self._own / self._total
        rest = step * max(0, self._total - self._skipped - self._done)
        done, spent = step * self._done, self._stepped - self._began if self._own else 0.0
        pace = _pace(self._taken + spent, self._predicted + done, _TRUST * whole)
        own = _pace(spent, done, _TRUST * self._own, pace)
        waited = self._clock() - self._stepped  # into the step at work, which may be longer than others
        return own * rest - min(waited, own * min(step, rest)) + pace * to_come


def _pace(taken: float, predicted: float, weight: float, before: float = 1.0) -> float:
    """Seconds that a predicted second takes, where `weight` seconds had taken `before` as long."""
    return (taken + before * weight) / (predicted + weight) if predicted + weight > 0 else before


def format_seconds(seconds: float) -> str:
    """Format a predicted duration with few digits: 12000 is `3 h 20 min`."""
    if seconds < 1:
        return "1 s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(hours + minutes / 60), 24)
    return f"{days} days {hours} h" if hours else f"{days} days"
