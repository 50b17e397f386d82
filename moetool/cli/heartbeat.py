"""A sign of life at fixed intervals, however long a unit of work takes."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from moetool.checkpoint.sizes import format_bytes
from moetool.job.forecast import format_seconds
from moetool.job.memory import anonymous_bytes
from moetool.job.result import Printed

HEARTBEAT_SECONDS = 30.0
_SAMPLED_SECONDS = 1.0


@dataclass(frozen=True)
class Pulse(Printed):
    """Progress of a job at one moment: phase, rate, memory, time left.

    Attributes:
        phase: at work.
        done, total: units of the phase, those of earlier runs left out; 0 where they are not counted.
        units_per_second: in this phase.
        memory_bytes, peak_memory_bytes: anonymous memory, now and the most that was seen of it once a second.
        seconds_left: of the whole job where that is known (`in_all`), else of the phase; `None` if neither is.
        in_all: which.
    """

    phase: str
    done: int
    total: int
    units_per_second: float
    memory_bytes: int
    peak_memory_bytes: int
    seconds_left: float | None
    in_all: bool

    def __str__(self) -> str:
        rate = self.units_per_second
        pace = f", {rate:.1f} per s" if rate >= 1 else f", {1 / rate:.1f} s each" if rate else ""
        left = ""
        if self.seconds_left is not None:
            left = f", about {format_seconds(self.seconds_left)} left{' in all' if self.in_all else ''}"
        memory = f"memory {format_bytes(self.memory_bytes)}, at most {format_bytes(self.peak_memory_bytes)}"
        where = f"{self.done} of {self.total}{pace}, " if self.total else ""
        return f"{self.phase}: {where}{memory}{left}"


class Heartbeat:
    """A thread that calls `beat(memory, peak)`, in bytes, every `interval` seconds until it is stopped."""

    def __init__(
        self,
        beat: Callable[[int, int], None],
        interval: float = HEARTBEAT_SECONDS,
        sampled: float = _SAMPLED_SECONDS,
        peak: int = 0,
    ) -> None:
        self.peak = peak
        self._beat, self._interval, self._sampled = beat, interval, sampled
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        spoke = time.monotonic()
        while not self._stop.wait(self._sampled):
            memory = anonymous_bytes()
            self.peak = max(self.peak, memory)
            if time.monotonic() - spoke >= self._interval:
                spoke = time.monotonic()
                self._beat(memory, self.peak)

    def stop(self) -> None:
        """End the heartbeat; no event of it is written after this returns."""
        self._stop.set()
        self._thread.join()
