"""Models of several sizes, each made, measured on windows held out, and deleted."""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes
from moetool.compress.mixing.increase import SizeSearch
from moetool.compress.told import Trial
from moetool.errors import UsageError
from moetool.job.calibrated import streamed_losses
from moetool.job.job import Job
from moetool.job.workspace import TRIALS

# Makes a model of at most so many bytes in a directory, or what is missing of it.
Make = Callable[[int, Path], object]


@dataclass(frozen=True, eq=False)
class Trials:
    """Those of one job, each a unit.

    Attributes:
        job: the job.
        windows: held out, `[windows, length]` token ids.
        make: makes a model.
        experts_at_once: how many of a layer's experts are in memory together.
    """

    job: Job
    windows: Tensor
    make: Make
    experts_at_once: int

    def search(self, search: SizeSearch) -> Sequence[Trial]:
        """Try sizes until the smallest that holds is found, or there were enough: all that were tried, that one last.

        Raises:
            UsageError: not even the largest holds.
            InterruptedRunError: a stop was asked for; what has been tried is noted.
        """
        tried: list[Trial] = []
        while (size := search.next(tried)) is not None:
            tried.append(self._trial(size))
            self.job.progress.log(f"{len(tried)}: {in_words(tried[-1])}")
        if (best := search.best(tried)) is None:
            least = min(tried, key=lambda trial: trial.increase)
            raise UsageError(
                f"--max-increase {search.most:.3%} is not possible: with the most bits that are offered, perplexity on "
                f"{len(self.windows)} windows held out grows by more. The least that was measured: {in_words(least)}"
            )
        return [*(trial for trial in tried if trial != best), best]

    def _trial(self, size: int) -> Trial:
        job, unit = self.job, f"trial/{size}"
        before, directory = self._original(), job.work / TRIALS / f"{size}"
        if job.unit(unit):
            self.make(size, directory)
            deltas = self._losses(Checkpoint.open(directory)) - before
            mean, error = deltas.mean().item(), deltas.std().item() / math.sqrt(len(deltas))
            job.finish(unit, told=Trial(size, math.expm1(mean), math.exp(mean) * error).to_json())
        if directory.exists():
            shutil.rmtree(directory)
        found = job.workspace.told(unit)
        return Trial(**found)  # type: ignore[arg-type]  # as they were noted

    def _original(self) -> Tensor:
        """What the original loses, by window."""
        if self.job.unit("held-out"):
            self.job.finish("held-out", told={"losses": self._losses(self.job.source.checkpoint).tolist()})
        return torch.tensor(self.job.workspace.told("held-out")["losses"], dtype=torch.float64)

    def _losses(self, checkpoint: Checkpoint) -> Tensor:
        directory = self.job.work / TRIALS / "hidden"
        return streamed_losses(self.job, checkpoint, self.windows, directory, self.experts_at_once)


def in_words(trial: Trial) -> str:
    """A trial in words."""
    return (
        f"{format_bytes(trial.bytes)}: perplexity grows by {trial.increase:.2%} ± {trial.increase_error:.2%} "
        "on windows held out."
    )
