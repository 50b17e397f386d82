"""Measure the peak memory of this process in bytes, without pages of files that the system may drop."""

import threading
from typing import Self

import psutil


def anonymous_bytes() -> int:
    """Anonymous memory in use: what the process itself has allocated. Mapped files, which the kernel may drop, are not
    counted where the platform can tell them apart."""
    held = psutil.Process().memory_info()
    return int(held.rss - getattr(held, "shared", 0))


class PeakMemory:
    """Samples memory for the time of a `with` block; `bytes` is the most that was seen."""

    def __init__(self, interval: float = 0.05) -> None:
        self.bytes = self._lap = anonymous_bytes()
        self._interval, self._stop, self._lock = interval, threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            self._look()

    def _look(self) -> None:
        with self._lock:  # what is read before a lap ends must not count in the next
            now = anonymous_bytes()
            self.bytes, self._lap = max(self.bytes, now), max(self._lap, now)

    def lap(self) -> int:
        """The most bytes in use since the last call, or since the beginning."""
        with self._lock:
            now = anonymous_bytes()
            self.bytes, most, self._lap = max(self.bytes, now), max(self._lap, now), now
        return most

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
