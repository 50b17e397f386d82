"""Conditions beside the options that fix the order of a job's sums: noted at its start, kept by every resumed run.

A sum in another order differs in its last digit, which can round a borderline weight the other way. A run resumed with
other free memory, another `--memory` or another number of threads would then not write the bytes of an undisturbed run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Self

import torch

from moetool.job.plan import Plan
from moetool.job.processes import processes


@dataclass(frozen=True)
class Conditions:
    """Under which a run was begun.

    Attributes:
        experts_at_once: of a layer, in memory together; `None` for a job that does not go through layers of experts.
        threads: of torch, in each process.
        processes: that shared the job.
    """

    experts_at_once: int | None
    threads: int
    processes: int

    @classmethod
    def now(cls, plan: Plan) -> Self:
        """Take the conditions of a run that begins in this process: experts at once, threads and processes."""
        return cls(plan.experts_at_once, torch.get_num_threads(), processes())

    @classmethod
    def noted(cls, said: Mapping[str, object]) -> Self | None:
        """The conditions that a journal has noted; `None` if it has none."""
        at_once, threads, count = (said.get(name) for name in ("experts_at_once", "threads", "processes"))
        if not isinstance(threads, int) or not isinstance(count, int):
            return None
        return cls(at_once if isinstance(at_once, int) else None, threads, count)

    def to_json(self) -> dict[str, object]:
        """Return the conditions as JSON values for the journal, which `noted` reads back."""
        return asdict(self)

    @property
    def threads_here(self) -> int:
        """The number of threads to go on with; another number of processes orders sums anew, whatever their threads."""
        return self.threads if self.processes == processes() else torch.get_num_threads()


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads to `count` for the time of a `with` block."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
