"""Evaluation of several models on texts, on lm-eval tasks, or on both; and the scores of tasks and their groups."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moetool.architectures.dense import is_encoder
from moetool.calibration.comparable import check_same_tokens
from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import UsageError
from moetool.job.progress import Progress
from moetool.measure.loading import load_to_evaluate
from moetool.measure.perplexity import EvaluationOptions, perplexity
from moetool.measure.results import SynthesisResult
from moetool.measure.tasks.harness import OpenTasks, asked, open_tasks
from moetool.measure.tasks.options import GROUPS, TaskOptions
from moetool.measure.tasks.results import Evaluated, Evaluations, TaskScore, TasksEvaluated
from moetool.runtime.modules.batch_dependence import depends_on_batch

_ERROR = "_stderr"


def evaluate(
    models: Sequence[str],
    text: EvaluationOptions | None,
    tasks: TaskOptions | None,
    progress: Progress,
    seen: Callable[[Evaluated], Evaluated] = lambda found: found,
) -> Evaluations:
    """Evaluate models one after the other; all of them, and all tasks, are opened before the first is loaded.

    Args:
        models: directories or hub ids.
        text: on which text, if on one, and how.
        tasks: on which tasks, if on any, and how.
        progress: told where it is.
        seen: is given each model as soon as it is done, and returns what to keep of it.

    Raises:
        UsageError: an encoder has no tasks, or is asked for a text's perplexity beside a model that generates; or as
            `open_tasks`.
        InvalidInputError: a text is other tokens to one model than to another.
        MoetoolError: as `perplexity` and `open_tasks`.
    """
    checkpoints = [Checkpoint.open(model) for model in models]
    if text is not None:
        for checkpoint in checkpoints[1:]:
            check_same_tokens(checkpoints[0], checkpoint, load_tokenizer(checkpoint.path))
    if tasks is not None:
        for checkpoint in checkpoints:
            if is_encoder(checkpoint.config):
                raise UsageError(f"{checkpoint.source} is an encoder: lm-eval's tasks are for models that generate.")
            load_tokenizer(checkpoint.path)
    opened = None if tasks is None else open_tasks(tasks)
    found = []
    for checkpoint in checkpoints:
        found.append(
            seen(
                Evaluated(
                    model=checkpoint.source,
                    fingerprint=checkpoint.fingerprint(),
                    text=None if text is None else perplexity(checkpoint.source, text, progress),
                    tasks=None if opened is None or tasks is None else _on_tasks(checkpoint, opened, tasks, progress),
                )
            )
        )
        _free()
    return Evaluations(models=found)


def _on_tasks(checkpoint: Checkpoint, opened: OpenTasks, options: TaskOptions, progress: Progress) -> TasksEvaluated:
    model, synthesis = load_to_evaluate(checkpoint, options, progress)
    progress.log(f"Asking {checkpoint.source} {', '.join(options.tasks)}.")
    scores = task_scores(asked(opened, model, load_tokenizer(checkpoint.path), options, progress))
    return TasksEvaluated(
        scores=[*scores, *group_means(scores, options.tasks)],
        limit=options.limit,
        library=opened.library,
        synthesized=synthesis.chosen,
        synthesis=SynthesisResult.of(synthesis),
        batch_size=options.batch_size,
        depends_on_batch=depends_on_batch(model),
    )


def _free() -> None:
    """Give back what a model has held, before the next is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def task_scores(results: Mapping[str, Mapping[str, Any]]) -> list[TaskScore]:
    """Every number in what `lm_eval.simple_evaluate` returns: there the keys are `metric,filter`, and the standard
    error's `metric_stderr,filter`, a number or `N/A`. Groups of lm-eval stand before their tasks."""
    counts, shots, versions = (results.get(key, {}) for key in ("n-samples", "n-shot", "versions"))
    found = []
    for task, numbers in {**results.get("groups", {}), **results["results"]}.items():
        for key, value in numbers.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith(_ERROR) or not _is_number(value):
                continue
            error, version = numbers.get(f"{metric}{_ERROR},{name}"), versions.get(task)
            found.append(
                TaskScore(
                    task=task,
                    metric=metric,
                    filter=name,
                    value=float(value),
                    error=float(error) if _is_number(error) else None,
                    questions=counts.get(task, {}).get("effective", numbers.get("sample_len")),
                    few_shot=shots.get(task),
                    version=None if version is None else str(version),
                )
            )
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def group_means(scores: Sequence[TaskScore], asked: Sequence[str]) -> list[TaskScore]:
    """Mean scores of the groups that moetool names and that were asked for: over the n tasks of a group, of each metric
    that all of them have, with the standard error `√(Σ e²) / n` of independent tasks."""
    found = []
    for group in (name for name in asked if name in GROUPS):
        tasks = GROUPS[group]
        by_metric: dict[tuple[str, str], dict[str, TaskScore]] = {}
        for score in scores:
            if score.task in tasks:
                by_metric.setdefault((score.metric, score.filter), {})[score.task] = score
        for (metric, name), own in by_metric.items():
            if own.keys() != set(tasks):
                continue
            errors = [score.error for score in own.values() if score.error is not None]
            found.append(
                TaskScore(
                    task=group,
                    metric=metric,
                    filter=name,
                    value=sum(score.value for score in own.values()) / len(own),
                    error=math.hypot(*errors) / len(own) if len(errors) == len(own) else None,
                    questions=None,
                    few_shot=None,
                    version=None,
                )
            )
    return found
