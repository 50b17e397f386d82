"""How a job tells where it is. The pipeline reports, the command line draws."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from moetool.job.result import PhaseTime


class Progress(Protocol):
    """Receives what a job is doing."""

    def expect(self, phases: Sequence[PhaseTime]) -> None:
        """These phases will come, and take about so long."""

    def start(self, phase: str, total: int) -> None:
        """A phase of `total` steps begins."""

    def advance(self) -> None:
        """One step is done."""

    def skip(self, steps: int) -> None:
        """So many steps had been done by an earlier run."""

    def finish(self) -> None:
        """The phase is over."""

    def log(self, message: str) -> None:
        """Something worth a line of its own."""


class Silent:
    """Draws nothing."""

    def expect(self, phases: Sequence[PhaseTime]) -> None: ...

    def start(self, phase: str, total: int) -> None: ...

    def advance(self) -> None: ...

    def skip(self, steps: int) -> None: ...

    def finish(self) -> None: ...

    def log(self, message: str) -> None: ...


class Stopwatch:
    """Passes on what it receives, and times it.

    Attributes:
        seconds: of every phase by its name, in the order in which they began.
    """

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._clock = progress, clock
        self._phase, self._began = "", 0.0
        self.seconds: dict[str, float] = {}

    def expect(self, phases: Sequence[PhaseTime]) -> None:
        self._progress.expect(phases)

    def start(self, phase: str, total: int) -> None:
        self._phase, self._began = phase, self._clock()
        self.seconds.setdefault(phase, 0.0)
        self._progress.start(phase, total)

    def advance(self) -> None:
        self._progress.advance()

    def skip(self, steps: int) -> None:
        self._progress.skip(steps)

    def finish(self) -> None:
        self.seconds[self._phase] += self._clock() - self._began
        self._progress.finish()

    def log(self, message: str) -> None:
        self._progress.log(message)


@contextmanager
def phase(progress: Progress, name: str, total: int) -> Iterator[None]:
    """A phase as a `with` block."""
    progress.start(name, total)
    try:
        yield
    finally:
        progress.finish()
