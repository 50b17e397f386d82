"""lm-eval's results as records, and the means over groups."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moetool.measure.tasks.options import GROUPS
from moetool.measure.tasks.results import TaskScore

_ERROR = "_stderr"


def task_scores(results: Mapping[str, Any]) -> list[TaskScore]:
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
    """Of every group of ours that was asked for, the mean over its n tasks of each metric that all of them have, with
    the standard error `√(Σ e²) / n`, as for tasks that have no question in common."""
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
