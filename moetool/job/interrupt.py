"""Orderly interruption: after SIGTERM a job finishes the unit in hand and exits in a state that `--resume` continues.
While kernels compile, which takes longer than most units, it exits at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from moetool.compiled.compiler import is_compiling
from moetool.errors import InterruptedRunError


class Interrupt:
    """A flag that a stop was asked for, which jobs check between units of work."""

    def __init__(self) -> None:
        self.requested = False

    def check(self) -> None:
        """Between two units: raise `InterruptedRunError` if a stop was asked for."""
        if self.requested:
            self.stop()

    def stop(self) -> NoReturn:
        """Raise `InterruptedRunError` with the advice to resume."""
        raise InterruptedRunError("Stopped as asked, after finishing the unit in hand. Go on with --resume.")


@contextmanager
def listening() -> Iterator[Interrupt]:
    """Context manager in which SIGTERM sets the flag of the returned `Interrupt` instead of ending the process.

    Raises:
        InterruptedRunError: it came while the process waited for a compiler, which is ended.
    """
    interrupt, ended = Interrupt(), list[int]()

    def request(signum: int, frame: FrameType | None) -> None:
        interrupt.requested = True
        if is_compiling() and not ended:  # a second one does not disturb what the first one ends
            ended.append(signum)
            raise InterruptedRunError("Stopped as asked, while kernels were compiled. Go on with --resume.")

    previous = signal.signal(signal.SIGTERM, request)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGTERM, previous)
