"""What `moetool eval` prints."""

from collections.abc import Callable, Sequence
from pathlib import Path

from moetool.cli.display import print_fields, print_table
from moetool.measure.tasks.told import Evaluated, Evaluations, TaskScore
from moetool.measure.told import Divergence, Evaluation
from moetool.runtime.modules.batch_dependence import BATCH_DEPENDENT


def print_evaluation(result: Evaluation) -> None:
    """One model on a text."""
    print_fields(
        [
            ("model", result.model),
            ("data", _text(result)),
            (result.protocol, f"{result.perplexity:.4f}"),
            ("nll", f"{result.nll:.6f}"),
            *(_against(result.against) if result.against else ()),
            *_synthesis(result),
            *(_batches(result.batch_rows) if result.depends_on_batch else ()),
        ]
    )


def print_evaluations(result: Evaluations) -> None:
    """Several models, or one on tasks: a row for every measure, a column for every model."""
    names = model_names([found.model for found in result.models])
    texts = {_text(found.text) for found in result.models if found.text is not None}
    print_fields([("data", text) for text in sorted(texts)])
    print_table(("", "n", "shots", "metric", *names), [*_text_rows(result.models), *_task_rows(result.models)])
    for name, found in zip(names, result.models, strict=True):
        if any(part is not None and part.depends_on_batch for part in (found.text, found.tasks)):
            print_fields([("note", f"{name}: {BATCH_DEPENDENT}")])
        if found.saved is not None:
            print_fields([("saved", found.saved)])


def model_names(models: Sequence[str]) -> list[str]:
    """The last part of every path, or all of it where two models would be called the same."""
    short = [Path(model).name or model for model in models]
    return short if len(set(short)) == len(short) else list(models)


def _text_rows(models: Sequence[Evaluated]) -> list[tuple[str, ...]]:
    texts = [found.text for found in models]
    first = next((text for text in texts if text is not None), None)
    if first is None:
        return []
    measures: dict[str, Callable[[Evaluation], str]] = {
        first.protocol: lambda text: f"{text.perplexity:.4f}",
        "nll": lambda text: f"{text.nll:.6f}",
    }
    if first.against is not None:
        measures |= {
            "excess": lambda text: _excess(text.against) if text.against else "",
            "KL": lambda text: f"{text.against.kl:.6f}" if text.against else "",
            "top-1": lambda text: f"{text.against.agreement:.2%}" if text.against else "",
        }
    return [
        ("text", f"{first.windows:,}", "", name, *("" if text is None else told(text) for text in texts))
        for name, told in measures.items()
    ]


def _task_rows(models: Sequence[Evaluated]) -> list[tuple[str, ...]]:
    found = [
        {(score.task, score.metric, score.filter): score for score in each.tasks.scores} if each.tasks else {}
        for each in models
    ]
    rows = []
    for key in dict.fromkeys(key for scores in found for key in scores):
        first = next(scores[key] for scores in found if key in scores)
        metric = first.metric if first.filter == "none" else f"{first.metric}, {first.filter}"
        counts = ("" if number is None else f"{number:,}" for number in (first.questions, first.few_shot))
        cells = (_score(scores[key]) if key in scores else "" for scores in found)
        rows.append((first.task if first.questions is not None else f"mean of {first.task}", *counts, metric, *cells))
    return rows


def _score(score: TaskScore) -> str:
    return f"{score.value:.4f}" + ("" if score.error is None else f" ± {score.error:.4f}")


def _text(result: Evaluation) -> str:
    tokens = f"{result.windows:,} windows of {result.sequence_length} tokens"
    if result.begin:
        tokens += f", each after {result.begin}"
    return f"{result.data} ({tokens})"


def _against(found: Divergence) -> list[tuple[str, str]]:
    """How far it is from the original."""
    return [
        ("against", f"{found.model} (perplexity {found.perplexity:.4f}, nll {found.nll:.6f})"),
        ("excess", f"{_excess(found)} nats per token"),
        ("KL", f"{found.kl:.6f} nats per token"),
        ("top-1 agreement", f"{found.agreement:.2%}"),
    ]


def _excess(found: Divergence) -> str:
    return f"{found.excess:.6f}" + ("" if found.excess_error is None else f" ± {found.excess_error:.6f}")


def _synthesis(result: Evaluation) -> list[tuple[str, str]]:
    """How a compressed model's experts were made; nothing of any other model."""
    told = result.synthesis
    made = "dense when loaded" if result.synthesized == "load" else "as they run"
    return [("experts", f"made {made}: {told.reason}")] if told.needed_bytes else []


def _batches(rows: int) -> list[tuple[str, str]]:
    """What to know of a result that is one of this size of batches."""
    together = "one window" if rows == 1 else f"{rows} windows"
    return [
        ("batches", f"of {together} each; another --batch-tokens gives another result"),
        ("note", BATCH_DEPENDENT),
    ]
