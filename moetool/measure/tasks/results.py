"""Results of `moetool eval` for several models and for tasks (docs/json.md), and the file that they are saved to."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from moetool.checkpoint.source import local_path
from moetool.format.gguf.words import MODEL
from moetool.job.result import Printed
from moetool.measure.results import Evaluation, SynthesisResult


@dataclass(frozen=True, kw_only=True)
class TaskScore(Printed):
    """One metric of one task, as lm-eval has it.

    Attributes:
        task: its name; of a group of ours, the group's.
        metric: `acc`, `acc_norm`, `pass@1` …; of a group, the mean over its tasks.
        filter: what was done to the answers before, `none` for nothing.
        value: of the metric.
        error: its standard error; `None` where lm-eval knows none.
        questions: that were asked; `None` of a group.
        few_shot: examples before each; `None` of a group.
        version: of the task; `None` of a group, and of a task without one.
    """

    task: str
    metric: str
    filter: str
    value: float
    error: float | None
    questions: int | None
    few_shot: int | None
    version: str | None


@dataclass(frozen=True, kw_only=True)
class TasksEvaluated(Printed):
    """Scores of one model on all tasks.

    Attributes:
        scores: every metric of every task.
        limit: only the first so many questions of each task were asked; `None` for all.
        library: lm-eval's version.
        synthesized: when a compressed model's experts were made dense.
        synthesis: why.
        batch_size: questions in a batch.
        depends_on_batch: whether the scores depend on that.
    """

    scores: Sequence[TaskScore]
    limit: int | None
    library: str
    synthesized: Literal["load", "on-the-fly"]
    synthesis: SynthesisResult
    batch_size: int
    depends_on_batch: bool


@dataclass(frozen=True, kw_only=True)
class Evaluated(Printed):
    """One model.

    Attributes:
        model: as it was given.
        fingerprint: of its config and weights.
        text: how well it predicts a text, if one was given.
        tasks: its scores, if tasks were given.
        saved: the file with all this, if one was written.
    """

    model: str
    fingerprint: str
    text: Evaluation | None = None
    tasks: TasksEvaluated | None = None
    saved: str | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluations(Printed):
    """Results of all models that `moetool eval` was given, in that order."""

    models: Sequence[Evaluated]


def place_beside(model: str) -> Path:
    """A path that no file has, so that nothing is written over: `NAME.eval.json` beside a checkpoint's directory, or in
    the current one for a hub id and where nobody may write beside it; with a number from the second on."""
    folder, name = _folder_and_name(model)
    names = (f"{name}.eval{'' if number == 1 else f'-{number}'}.json" for number in count(1))
    return next(file for file in map(folder.joinpath, names) if not os.path.lexists(file))


def saved_beside(model: str) -> list[Path]:
    """The files that are there under names of `place_beside`, in the order of their numbers; none of another model,
    such as `NAME.eval-old`."""
    folder, name = _folder_and_name(model)
    named = re.compile(rf"{re.escape(name)}\.eval(?:-([2-9]|[1-9]\d+))?\.json")
    found = [(int(match[1] or 1), file) for file in folder.iterdir() if (match := named.fullmatch(file.name))]
    return [file for _, file in sorted(found)]


def _folder_and_name(model: str) -> tuple[Path, str]:
    path = local_path(model).resolve()
    place = path.parent if path.name == MODEL else path  # an export's file is called by its directory
    folder = place.parent if place.exists() and os.access(place.parent, os.W_OK) else Path.cwd()
    return folder, place.name if place.exists() else model.replace("/", "--")
