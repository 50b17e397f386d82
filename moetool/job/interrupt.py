"""SIGTERM finishes the unit in hand and exits resumably."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from moetool.errors import InterruptedRunError


class Interrupt:
    """Remembers that somebody asked to stop."""

    def __init__(self) -> None:
        self.requested = False

    def check(self) -> None:
        """Between two units: raise `InterruptedRunError` if a stop was asked for."""
        if self.requested:
            self.stop()

    def stop(self) -> NoReturn:
        """Raise `InterruptedRunError`."""
        raise InterruptedRunError("Stopped as asked, after finishing the unit in hand. Go on with --resume.")


@contextmanager
def listening() -> Iterator[Interrupt]:
    """Turn SIGTERM into a flag for the time of the `with` block."""
    interrupt = Interrupt()

    def request(signum: int, frame: FrameType | None) -> None:
        interrupt.requested = True

    previous = signal.signal(signal.SIGTERM, request)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGTERM, previous)
