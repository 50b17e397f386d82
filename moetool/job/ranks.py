"""Communication of the processes that share a job: messages, sums, and the end of all when one fails.

All go through the same program and call what is here in the same order. Numbers and words go over `torch.distributed`,
by gloo between processors and by nccl between cards that belong to one process each; notes to the first process, which
nobody waits for, over the store by which they have met. Every wait ends when another process fails or is lost, and
long work of the main thread, too: see `watch`. An error is told once, by the first process: those of others reach it.
Nothing is pickled on the way: see `messages`.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from moetool.calibration.peers import Peers, SaidT
from moetool.errors import InterruptedRunError, exit_code, explained
from moetool.job.messages import from_bytes, to_bytes
from moetool.job.processes import local_processes, local_rank, processes, rank
from moetool.job.watch import Watch

START = timedelta(minutes=10)  # by which all processes have to have come
TIMEOUT = timedelta(hours=24)  # for which the quickest waits for the slowest, where nobody says that it is gone
_POSTS, _STOP = "posts", "stop"


class Ranks(Peers):
    """The processes of a job: here one process alone, which has nobody to wait for."""

    _ended: object = None  # the Trainer's group

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
        """Let the others know that this process ends; returns when they have ended, or after a few seconds.

        Raises:
            MoetoolError: instead, why it really ends, where the error only says that another has gone.
            SystemExit: the first process tells the error.
        """

    def close(self) -> None:
        """Called when all is done: wait until every process is, and end their communication."""
        if dist.is_initialized():  # a Trainer's, that a launcher has started alone
            # Kept until this is gone. Else a model that was trained lets go of it last, which waits for the group's
            # threads with Python's lock held, for which one of them may be waiting.
            self._ended = dist.group.WORLD
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.fail(error)
            return
        try:
            self.close()
        except BaseException as late:
            self.fail(late)
            raise


def joined(*, has_trainer: bool) -> Ranks:
    """The processes of this job, as a launcher has told this one: it alone, a Trainer's, or those that share units."""
    if processes() == 1:
        return Ranks()
    return TrainerRanks() if has_trainer else JoinedRanks()


@contextlib.contextmanager
def telling(*, has_trainer: bool) -> Iterator[None]:
    """Context manager for what precedes `joined`: the processes meet for an error alone, to end and to tell it as of a
    later one."""
    try:
        yield
    except Exception:
        with joined(has_trainer=has_trainer):
            raise


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
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
        place = f"tcp://{host}:{port}?rank={self.rank}&world_size={self.size}"
        try:
            store, _, _ = next(rendezvous(place, timeout=START))
            self._store = PrefixStore("moetool", store)
            self._group = self._connected(PrefixStore("group", self._store))
        except RuntimeError as error:
            raise InterruptedRunError(
                f"The {self.size} processes of this job do not reach each other: {error}"
            ) from error
        self._read = 0  # notes that the first has read
        self._watch = Watch(self._store, self.rank, self.size)

    def _connected(self, store: Store) -> dist.ProcessGroup:
        """Connect the processes that have met at a store; returns when all are there."""
        self._has_card = torch.cuda.is_available() and self.here <= torch.cuda.device_count()
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank() % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if self._has_card else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
        group = dist.group.WORLD
        assert group is not None
        return group

    def _wait(self, begin: Callable[[], dist.Work], meanwhile: Callable[[], None] = lambda: None) -> None:
        self._watch.check()
        pause = 2e-5
        try:
            work = begin()
            while not work.is_completed():
                meanwhile()
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
            work.wait()
        except RuntimeError as error:
            raise self._watch.disconnected() from error

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._wait(lambda: self._group.allreduce(torch.zeros(1)), meanwhile)

    def broadcast(self, said: SaidT, owner: int = 0) -> SaidT:
        content = to_bytes(said) if self.rank == owner else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self._wait(lambda: self._group.broadcast(size, owner))
        if self.rank != owner:
            content = torch.empty(int(size), dtype=torch.uint8)
        self._wait(lambda: self._group.broadcast(content, owner))
        return said if self.rank == owner else cast(SaidT, from_bytes(content))

    def gather(self, said: SaidT) -> list[SaidT]:
        return [self.broadcast(said, owner) for owner in range(self.size)]

    def all_reduce(self, tensor: Tensor) -> None:
        with self._within_reach(tensor) as near:
            self._wait(lambda: self._group.allreduce(near))

    def reduce(self, tensor: Tensor, owner: int) -> None:
        with self._within_reach(tensor) as near:
            self._wait(lambda: self._group.reduce(near, owner))

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
        self._watch.check()
        try:
            yield
        except RuntimeError as error:
            raise self._watch.loss() from error

    def fail(self, error: BaseException) -> None:
        if self._watch.has_left.is_set():
            return
        has_told = self._watch.fail(error) and not self.is_first
        is_bug = isinstance(error, Exception) and explained(error) is None
        if has_told and not is_bug:
            raise SystemExit(exit_code(error)) from error

    def close(self) -> None:
        self.barrier()
        self._watch.leave()
        super().close()


class TrainerRanks(JoinedRanks):
    """The processes that transformers' Trainer brings together, each of which goes through all of a job.

    They share batches, and no units of work: as far as units go, each is alone (`size` is 1) and the first keeps the
    books. The Trainer connects them when it is made. What is said here goes over a connection of its own, from the
    beginning to `close`, after which the first goes on alone, and others may end before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.size = 1

    def _connected(self, store: Store) -> dist.ProcessGroup:
        self._has_card = False
        return cast(dist.ProcessGroup, ProcessGroupGloo(store, self.rank, self.size, TIMEOUT))

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        if not self._watch.has_left.is_set():
            super().barrier(meanwhile)

    def broadcast(self, said: SaidT, owner: int = 0) -> SaidT:
        return said if self._watch.has_left.is_set() else super().broadcast(said, owner)

    def is_stopping(self, asked: bool) -> bool:
        """Whether any process was asked to stop: they have to stop at the same step."""
        stopping = torch.tensor([float(asked)])
        if not self._watch.has_left.is_set():
            self.all_reduce(stopping)
        return bool(stopping)

    def fail(self, error: BaseException) -> None:
        """Where the Trainer's connection broke, the error is what broke it."""
        if not self._watch.has_left.is_set() and _is_disconnection(error):
            cause = self._watch.disconnected()
            super().fail(cause)
            raise cause from error
        super().fail(error)

    def close(self) -> None:
        if not self._watch.has_left.is_set():
            super().close()


def _is_disconnection(error: BaseException) -> bool:
    """Whether an error of a collective operation of torch says that another process has gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
