"""Evaluates several models on texts, on tasks of lm-eval, or on both."""

import gc
from collections.abc import Callable, Sequence

import torch

from moetool.architectures.dense import is_encoder
from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import UsageError
from moetool.job.progress import Progress, phase
from moetool.measure.divergence import check_tokens
from moetool.measure.perplexity import EvaluationOptions, perplexity
from moetool.measure.results import SynthesisResult
from moetool.measure.tasks.harness import OpenTasks, asked, open_tasks
from moetool.measure.tasks.options import TaskOptions
from moetool.measure.tasks.results import Evaluated, Evaluations, TasksEvaluated
from moetool.measure.tasks.scores import group_means, task_scores
from moetool.runtime.modules.batch_dependence import depends_on_batch


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
            check_tokens(checkpoints[0], checkpoint, load_tokenizer(checkpoint.path))
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
    from moetool.measure.loading import load_to_evaluate

    model, synthesis = load_to_evaluate(checkpoint, options, progress)
    progress.log(f"Asking {checkpoint.source} {', '.join(options.tasks)}.")
    with phase(progress, "Tasks", 0):
        scores = task_scores(asked(opened, model, load_tokenizer(checkpoint.path), options))
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
