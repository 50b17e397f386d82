"""The watch of a process over the others that share its job: it sees that one has failed, and says so of its own."""

import _thread
import contextlib
import json
import os
import signal
import sys
import threading
import time
from types import FrameType

from torch.distributed import Store  # type: ignore[attr-defined]

from moetool.errors import InterruptedRunError, MoetoolError, exit_code, explained

WATCH_SECONDS, LEAVE_SECONDS = 0.5, 10.0
STUCK_SECONDS = 60.0  # after which a main thread does not come back, as from nccl when another process is gone
ALERT = signal.SIGURG  # which does nothing by itself, and which nobody sends
_FAILURE, _LEFT = "failure", "left"
_ERRORS = {kind.exit_code: kind for kind in MoetoolError.__subclasses__()}


class Watch:
    """Stops what the main thread is at, as Ctrl-C would, within a second after another process has failed; and the
    process itself, if that does not help.

    Attributes:
        has_left: set when this process no longer shares the job: nothing that others do stops it then.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """With the store by which the `size` processes of a job have met."""
        self._store, self._rank, self._size = store, rank, size
        self._elsewhere: BaseException | None = None
        self._is_lost = False  # whether somebody is gone who cannot say so
        self.has_left = threading.Event()
        self._previous = signal.signal(ALERT, self._alerted)
        threading.Thread(target=self._look, daemon=True).start()

    def check(self) -> None:
        """Raise what to end with, if another process has failed."""
        if self._elsewhere is not None:
            raise self._elsewhere

    def _look(self) -> None:
        while not self.has_left.wait(WATCH_SECONDS):
            if (found := self._failure()) is not None and not self.has_left.is_set():
                self._elsewhere = found
                _thread.interrupt_main(ALERT)
                if not self.has_left.wait(STUCK_SECONDS):
                    if not isinstance(found, SystemExit):
                        print(f"error: {found}", file=sys.stderr, flush=True)
                    os._exit(exit_code(found))

    def _alerted(self, number: int, frame: FrameType | None) -> None:
        if not self.has_left.is_set():
            self.check()

    def _failure(self) -> BaseException | None:
        try:
            if not self._store.check([_FAILURE]):
                return None
            where, code, message = json.loads(self._store.get(_FAILURE))
        except RuntimeError:  # the store is gone, and who kept it
            return self.loss()
        if self._rank:
            return SystemExit(code)
        if code == exit_code(KeyboardInterrupt()):
            return KeyboardInterrupt()
        return _ERRORS.get(code, MoetoolError)(f"Process {where + 1} of {self._size}: {message}")

    def loss(self) -> InterruptedRunError:
        """The error to end with when another process is gone, and has not said why."""
        self._is_lost = True
        return InterruptedRunError(f"A process of this job's {self._size} is gone. Go on with --resume.")

    def disconnected(self) -> BaseException:
        """What to end with after a connection to another process broke: what that has said before it went, or its
        loss."""
        _ignore_launcher()
        time.sleep(2 * WATCH_SECONDS)
        return self._elsewhere or self.loss()

    def fail(self, error: BaseException) -> bool:
        """Let the others know that this process ends with an error, and wait until they end, too, for a few seconds.

        Returns:
            Whether all have heard of it.
        """
        self.has_left.set()
        _ignore_launcher()
        shown = explained(error) if isinstance(error, Exception) else None
        message = f"{type(error).__name__}: {error}" if shown is None else str(shown)
        has_all = False
        with contextlib.suppress(RuntimeError):
            if self._elsewhere is None:
                self._store.set(_FAILURE, json.dumps((self._rank, exit_code(error), message)))
            self._store.add(_LEFT, 1)
            until = time.monotonic() + (0 if self._is_lost else LEAVE_SECONDS)
            while not (has_all := self._store.add(_LEFT, 0) >= self._size) and time.monotonic() < until:
                time.sleep(0.05)
            if self._rank == 0:
                time.sleep(0.2)  # the store goes with it, and the others are to see in it that all have left
        return has_all

    def leave(self) -> None:
        """Stop watching the other processes, once the job is done."""
        self.has_left.set()
        signal.signal(ALERT, self._previous)


def _ignore_launcher() -> None:
    """A launcher that sees another process end asks the rest to stop: this one does, and has a word to say."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
