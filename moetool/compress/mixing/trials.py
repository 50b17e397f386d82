"""Search for the smallest model whose perplexity grows by no more than was allowed: sizes are tried one by one.

Each size is made, measured on windows held out, and deleted. What forms are estimated to lose tells them apart, and not
what perplexity will be, so sizes are tried and measured. The logarithm of the increase falls about evenly with the bits
of every number, by ln 4 for each: half the step of a quantizer is a quarter of its squared error. Once a size holds and
a smaller one does not, a secant lies between them.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import BeforeValidator, Field, TypeAdapter
from torch import Tensor

from moetool.calibration.boundaries import kept_dtype
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes
from moetool.compress.results import Trial
from moetool.errors import UsageError
from moetool.job.job import Job
from moetool.job.progress import BATCHES, phase

EVALUATE = "Evaluate"  # a phase
_TRIAL = TypeAdapter(Trial)
MOST_TRIALS = 6
_CLOSE = 0.01  # share of the size: nearer than that to one that is too small, nothing is gained
_ENOUGH = 0.95  # share of the increase that is allowed at which the search ends,
_ENOUGH_ERROR = 0.5  # or half of it, if that is as near as so many of its standard errors
_LEAST_SHARE = 1e-3  # share of the increase that is allowed: less, or a decrease, counts as that
_PER_BIT = math.log(4)  # by which the logarithm of the increase falls
# Makes a model of at most so many bytes in the output directory of a part of the job.
Make = Callable[[int, Job], object]


def _share(value: object) -> object:
    """Turn `"2%"` into 0.02; a number is a share already."""
    if not isinstance(value, str):
        return value
    number, percent, rest = value.strip().partition("%")
    try:
        found = float(number + rest)
    except ValueError as error:
        raise ValueError(f"'{value}' is no increase; write it like 2% or 0.02") from error
    if not percent and found >= 1:
        raise ValueError(f"'{value}' would be {100 * found:g} %; if that is meant, write {100 * found:g}%")
    return found / 100 if percent else found


Increase = Annotated[float, BeforeValidator(_share), Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class SizeSearch:
    """Decides which size to try next.

    Attributes:
        most: largest increase of perplexity that is allowed, as a share.
        least, largest: range of sizes, in bytes.
        per_bit: bytes that one more bit for every number of the experts takes.
    """

    most: float
    least: int
    largest: int
    per_bit: float

    def best(self, trials: Sequence[Trial]) -> Trial | None:
        """The smallest trial within the limit; `None` if there is none."""
        return min((trial for trial in trials if trial.increase <= self.most), key=lambda own: own.bytes, default=None)

    def next(self, trials: Sequence[Trial]) -> int | None:
        """The size in bytes to try after these; `None` if there is nothing to gain, or there were enough."""
        found = self._next(trials) if trials else min(self.largest, round(self.least + 2 * self.per_bit))
        return None if found is None or found in {trial.bytes for trial in trials} else found

    def _next(self, trials: Sequence[Trial]) -> int | None:
        best = self.best(trials)
        failed = [trial for trial in trials if best is None or trial.bytes < best.bytes]
        below = max((trial for trial in failed if trial != best), key=lambda own: own.bytes, default=None)
        if best is None:
            assert below is not None
            if len(trials) >= MOST_TRIALS // 2:
                return self.largest
            return min(self.largest, round(below.bytes + self.per_bit * max(self._bits(below), 0.25)))
        discernible = max(self.most / 2, self.most - _ENOUGH_ERROR * best.increase_error)
        enough = min(_ENOUGH * self.most, discernible)
        if len(trials) >= MOST_TRIALS or best.bytes <= self.least or best.increase >= enough:
            return None
        if below is None:
            return max(self.least, round(best.bytes + self.per_bit * min(max(self._bits(best), -2.0), -0.125)))
        gap = best.bytes - below.bytes
        if gap <= _CLOSE * best.bytes:
            return None
        over, under = self._excess(below), -self._excess(best)
        # As in the Illinois method: an end that stays counts for half each time, so that both ends come closer.
        held = [trial.increase <= self.most for trial in trials]
        again = next((count for count, own in enumerate(reversed(held)) if own != held[-1]), len(held)) - 1
        over, under = (over / 2**again, under) if held[-1] else (over, under / 2**again)
        return below.bytes + round(gap * min(max(over / (over + under), 0.1), 0.9))

    def _bits(self, trial: Trial) -> float:
        """Bits that every number should have more than in a trial (less, if negative), by rule of thumb."""
        return self._excess(trial) / _PER_BIT

    def _excess(self, trial: Trial) -> float:
        """Logarithm of the increase as a multiple of what is allowed."""
        return math.log(max(trial.increase / self.most, _LEAST_SHARE))


@dataclass(frozen=True, eq=False)
class Trials:
    """Makes and measures the models of a search; each size is a unit of the job.

    Attributes:
        job: the job, each of whose parts makes one model.
        windows: windows held out, `[windows, length]` token ids.
        make: makes the model of one size.
        experts_at_once: how many of a layer's experts are in memory together.
    """

    job: Job
    windows: Tensor
    make: Make
    experts_at_once: int

    def search(self, search: SizeSearch) -> Sequence[Trial]:
        """Try sizes until the smallest within the limit is found, or there were enough.

        Returns:
            All trials, the one to keep last.

        Raises:
            UsageError: not even the largest size is within the limit.
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
        """Make a model of at most `size` bytes, measure it, delete it."""
        job, unit, name = self.job, f"trial/{size}", f"trial-{size}"
        directory = job.work / name
        before = self._original()
        if job.unit(unit):
            part = job.part(name)
            self.make(size, part)
            deltas = self._losses(Checkpoint.open(part.output)) - before
            mean, error = deltas.mean().item(), deltas.std().item() / math.sqrt(len(deltas))
            told = Trial(size, math.expm1(mean), math.exp(mean) * error).to_json()
            job.finish(unit, spent=[path for path in directory.rglob("*") if path.is_file()], told=told)
        if directory.exists():
            shutil.rmtree(directory)
        return _TRIAL.validate_python(job.workspace.told(unit))

    def _original(self) -> Tensor:
        """Mean loss of each window by the original model, fp64 `[windows]`."""
        if self.job.unit("held-out"):
            self.job.finish("held-out", told={"losses": self._losses(self.job.source.checkpoint).tolist()})
        return torch.tensor(self.job.workspace.told("held-out")["losses"], dtype=torch.float64)

    def _losses(self, checkpoint: Checkpoint) -> Tensor:
        """Mean next-token loss of each held-out window by a checkpoint of the job's family, one layer in memory at a
        time: `[windows]` fp64. Between layers, a requested stop is obeyed."""
        from moetool.calibration.streaming import StreamedModel

        job, directory = self.job, self.job.work / "held-out"
        model = StreamedModel(
            checkpoint, job.source.architecture, job.compute_dtype, job.device, experts_at_once=self.experts_at_once
        )
        kept, tick = kept_dtype(job.source.dtype, job.compute_dtype), job.progress.advance
        directory.mkdir(parents=True, exist_ok=True)
        sweep = Sweep(model, self.windows, directory, tick, kept=kept)
        with phase(job.progress, EVALUATE, (model.layer_count + 2) * sweep.batch_count, BATCHES):
            for _ in sweep.through_layers():
                job.interrupt.check()
            losses = sweep.losses()
        sweep.hidden(model.layer_count).path.unlink()
        return losses


def in_words(trial: Trial) -> str:
    """Describe the size and the measured increase in perplexity of a trial, in one sentence."""
    return (
        f"{format_bytes(trial.bytes)}: perplexity grows by {trial.increase:.2%} ± {trial.increase_error:.2%} "
        "on windows held out."
    )
