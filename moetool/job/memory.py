"""Peak memory of this process, without the page cache."""

import ctypes
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

_STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Anonymous memory in use: what the process itself has allocated. Mapped files, which the kernel may drop, are not
    counted where the platform can tell them apart."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def return_freed_memory() -> None:
    """Have glibc give large blocks back to the system as soon as they are freed.

    By default it learns to keep blocks of up to 32 MB, which is the size of the matrices that are worked on here one
    after the other, and the process grows by what it no longer uses. Does nothing on other C libraries.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    try:
        ctypes.CDLL(None).mallopt(mmap_threshold, 4 << 20)
    except (OSError, AttributeError, TypeError):
        return


def return_heap() -> None:
    """Give what is free inside glibc's heap back to the system.

    Matrices below the size that `return_freed_memory` names lie in the heap between longer-lived small objects, and
    what they leave never fits the next layer's quite: without this the heap grows with every layer, although what is
    in use does not. Takes milliseconds. Does nothing on other C libraries.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return


class PeakMemory:
    """Samples memory for the time of a `with` block; `bytes` is the most that was seen."""

    def __init__(self, interval: float = 0.05) -> None:
        self.bytes = anonymous_bytes()
        self._interval, self._stop = interval, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_bytes())
