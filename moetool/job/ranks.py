"""Communication of the processes that share a job: messages, sums, and the end of all when one fails.

All go through the same program and call what is here in the same order. Numbers and words go over `torch.distributed`,
by gloo between processors and by nccl between cards that belong to one process each; notes to the first process, which
nobody waits for, over the store by which they have met. Every wait ends when another process fails or is lost, and
long work of the main thread, too, as by Ctrl-C: the watch sees within a second that somebody has failed. Nothing is
pickled on the way: see `messages`.
"""

import _thread
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from moetool.calibration.peers import Peers, SaidT
from moetool.errors import InterruptedRunError, MoetoolError, explained
from moetool.job.messages import from_bytes, to_bytes
from moetool.job.processes import local_processes, local_rank, processes, rank

START = timedelta(minutes=10)  # by which all processes have to have come
TIMEOUT = timedelta(hours=24)  # for which the quickest waits for the slowest, where nobody says that it is gone
WATCH_SECONDS, LEAVE_SECONDS = 0.5, 10.0
ALERT = signal.SIGURG  # which does nothing by itself, and which nobody sends
_FAILURE, _POSTS, _STOP, _LEFT = "failure", "posts", "stop", "left"
_ERRORS = {kind.exit_code: kind for kind in MoetoolError.__subclasses__()}


class Ranks(Peers):
    """The processes of a job: here one process alone, which has nobody to wait for."""

    def check(self) -> None:
        """Raise what has become of another process, if one has failed."""

    def post(self, said: object) -> None:
        """Leave a note, some kB in words of JSON, for the first process, and go on."""
        raise NotImplementedError("one process writes no notes to itself")

    def posted(self) -> Iterator[Any]:
        """The notes that others have left since the first process last looked."""
        return iter(())

    def is_stopping(self, asked: bool) -> bool:
        """Between two units: whether this process or another was asked to stop."""
        return asked

    def fail(self, error: BaseException) -> None:
        """Let the others know that this process ends; returns when they have ended, or after a few seconds."""

    def close(self) -> None:
        """Called when all is done: wait until every process is, and end their communication."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is None:
                self.close()
        except BaseException as late:
            error = late
            raise
        finally:
            if error is not None:
                self.fail(error)


def joined(*, has_trainer: bool) -> Ranks:
    """The processes of this job, by what a launcher has told this one: a Trainer's, several that meet here, or one."""
    if has_trainer:
        return TrainerRanks()
    return JoinedRanks() if processes() > 1 else Ranks()


class TrainerRanks(Ranks):
    """The processes that transformers' Trainer brings together, each of which goes through all of a job.

    They share batches, and no units of work: as far as units go, each is alone (`size` is 1) and the first keeps the
    books. They meet when the Trainer is made, which is when they can tell one another something.
    """

    def __init__(self) -> None:
        self.rank = rank()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """A stop is told by the first alone: where that one fails, a launcher asks the others to stop."""
        super().__exit__(kind, error, trace)
        if isinstance(error, InterruptedRunError) and not self.is_first:
            raise SystemExit(error.exit_code) from error

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        if dist.is_initialized():
            dist.barrier()

    def is_stopping(self, asked: bool) -> bool:
        """Whether any process was asked to stop: they have to stop at the same step."""
        if not dist.is_initialized():
            return asked
        flag = torch.tensor(float(asked), device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def close(self) -> None:
        """End their communication when all have come here: the first goes on alone, and others may end before it."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


class JoinedRanks(Ranks):
    """Communication of one of several processes, which finds the others by what the launcher has set in its
    environment.

    Raises:
        InterruptedRunError: here and in every method: another process has not come, or is gone.
        MoetoolError: in every method: another process has failed; as it did.
        SystemExit: the same, in all processes but the first, which says why.
    """

    def __init__(self) -> None:
        self.rank, self.size, self.here = rank(), processes(), local_processes()
        self._has_card = torch.cuda.is_available() and self.here <= torch.cuda.device_count()
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank() % torch.cuda.device_count())
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
        place = f"tcp://{host}:{port}?rank={self.rank}&world_size={self.size}"
        try:
            store, _, _ = next(rendezvous(place, timeout=START))
            self._store = PrefixStore("moetool", store)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self._has_card else "gloo",
                store=PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=TIMEOUT,
            )
        except RuntimeError as error:
            raise InterruptedRunError(
                f"The {self.size} processes of this job do not reach each other: {error}"
            ) from error
        self._read = 0  # notes that the first has read
        self._elsewhere: BaseException | None = None
        self._is_lost = False  # whether somebody is gone who cannot say so
        self._has_left = threading.Event()
        self._previous = signal.signal(ALERT, self._alerted)
        threading.Thread(target=self._watch, daemon=True).start()

    def check(self) -> None:
        if self._elsewhere is not None:
            raise self._elsewhere

    def _watch(self) -> None:
        """In a thread of its own: see whether somebody has failed, and stop what this process is at."""
        while not self._has_left.wait(WATCH_SECONDS):
            if (found := self._failure()) is not None and not self._has_left.is_set():
                self._elsewhere = found
                _thread.interrupt_main(ALERT)
                return

    def _alerted(self, number: int, frame: FrameType | None) -> None:
        if not self._has_left.is_set():
            self.check()

    def _failure(self) -> BaseException | None:
        """What to end with, if another process has failed."""
        try:
            if not self._store.check([_FAILURE]):
                return None
            where, code, message = json.loads(self._store.get(_FAILURE))
        except RuntimeError:  # the store is gone, and who kept it
            return self._loss()
        if not self.is_first:
            return SystemExit(code)
        return _ERRORS.get(code, MoetoolError)(f"Process {where + 1} of {self.size}: {message}")

    def _loss(self) -> InterruptedRunError:
        self._is_lost = True
        return InterruptedRunError(
            f"A process of this job's {self.size} is gone. Go on with --resume, with as many processes as there are."
        )

    def _wait(self, begin: Callable[[], dist.Work | None], meanwhile: Callable[[], None] = lambda: None) -> None:
        self.check()
        pause = 2e-5
        try:
            work = begin()
            assert work is not None
            while not work.is_completed():
                meanwhile()
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
            work.wait()
        except RuntimeError as error:
            time.sleep(2 * WATCH_SECONDS)  # who fails says so before it goes
            self.check()
            raise self._loss() from error

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._wait(lambda: dist.all_reduce(torch.zeros(1), async_op=True), meanwhile)

    def broadcast(self, said: SaidT, owner: int = 0) -> SaidT:
        content = to_bytes(said) if self.rank == owner else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self._wait(lambda: dist.broadcast(size, owner, async_op=True))
        if self.rank != owner:
            content = torch.empty(int(size), dtype=torch.uint8)
        self._wait(lambda: dist.broadcast(content, owner, async_op=True))
        return said if self.rank == owner else cast(SaidT, from_bytes(content))

    def gather(self, said: SaidT) -> list[SaidT]:
        return [self.broadcast(said, owner) for owner in range(self.size)]

    def all_reduce(self, tensor: Tensor) -> None:
        with self._within_reach(tensor) as near:
            self._wait(lambda: dist.all_reduce(near, async_op=True))

    def reduce(self, tensor: Tensor, owner: int) -> None:
        with self._within_reach(tensor) as near:
            self._wait(lambda: dist.reduce(near, owner, async_op=True))

    @contextlib.contextmanager
    def _within_reach(self, tensor: Tensor) -> Iterator[Tensor]:
        """A tensor where the group can read and write it: not on a card that several processes share."""
        if self._has_card or tensor.device.type == "cpu":
            yield tensor
            return
        yield (near := tensor.cpu())
        tensor.copy_(near)

    def post(self, said: object) -> None:
        with self._store_errors():
            number = self._store.add(_POSTS, 1)
            self._store.set(f"{_POSTS}/{number}", json.dumps(said))

    def posted(self) -> Iterator[Any]:
        if not self.is_first:
            return
        with self._store_errors():
            while self._store.check([key := f"{_POSTS}/{self._read + 1}"]):
                content = self._store.get(key)
                self._store.delete_key(key)
                self._read += 1
                yield json.loads(content)

    def is_stopping(self, asked: bool) -> bool:
        with self._store_errors():
            if asked:
                self._store.set(_STOP, "")
            return bool(self._store.check([_STOP]))

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        self.check()
        try:
            yield
        except RuntimeError as error:
            raise self._loss() from error

    def fail(self, error: BaseException) -> None:
        if self._has_left.is_set():
            return
        self._has_left.set()
        shown = explained(error) if isinstance(error, Exception) else None
        code = error.code if isinstance(error, SystemExit) else getattr(shown, "exit_code", 1)
        message = f"{type(error).__name__}: {error}" if shown is None else str(shown)
        with contextlib.suppress(RuntimeError):
            if self._elsewhere is None:
                self._store.set(_FAILURE, json.dumps((self.rank, code, message)))
            self._store.add(_LEFT, 1)
            until = time.monotonic() + (0 if self._is_lost else LEAVE_SECONDS)
            while self._store.add(_LEFT, 0) < self.size and time.monotonic() < until:
                time.sleep(0.05)
            if self.is_first:
                time.sleep(0.2)  # the store goes with it, and the others are to see in it that all have left
        # What it ends with is settled: a launcher that sees another one end asks the rest to stop.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def close(self) -> None:
        self.barrier()
        self._has_left.set()
        signal.signal(ALERT, self._previous)
        dist.destroy_process_group()
