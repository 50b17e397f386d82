"""Rendering of `moetool eval`'s results as fields and tables on stdout."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from moetool.cli.display import print_fields, print_table
from moetool.measure.results import (
    NAT_UNIT,
    OWN_KIND_ALONE,
    Divergence,
    Evaluation,
    Likeness,
    OverTexts,
    TextLoss,
    kind_in_words,
    short_names,
    shown_excess,
    shown_kl,
)
from moetool.measure.tasks.results import Evaluated, Evaluations, TaskScore
from moetool.runtime.modules.batch_dependence import BATCH_DEPENDENT

Loss: TypeAlias = Evaluation | TextLoss  # of all texts, or of one


def print_evaluation(result: Evaluation) -> None:
    """One model on a text, or on several together and each by itself."""
    print_fields(
        [
            ("model", result.model),
            ("data", _text(result)),
            (result.protocol, f"{result.perplexity:.4f}"),
            ("loss", f"{result.nll:.6f} nats per token"),
            *(_against(result.against) if result.against else ()),
            *([("note", result.unrelated)] if result.unrelated else []),
            *over_texts(result.over_texts),
            *_calibration(result),
            *_synthesis(result),
            *(_batches(result.batch_rows) if result.depends_on_batch else ()),
        ]
    )
    print_texts(result.texts, result.protocol)


def _calibration(result: Evaluation) -> list[tuple[str, str]]:
    """What a model was calibrated on, and a warning where it is asked of nothing else."""
    if not result.calibration:
        return []
    told = [("calibrated on", ", ".join(short_names(result.calibration)))]
    if result.against is not None and all(text.own_kind for text in result.texts):
        told.append(("note", OWN_KIND_ALONE))
    return told


def over_texts(found: OverTexts | None) -> list[tuple[str, str]]:
    """Rows that summarize KL divergence over several texts; empty if there is only one."""
    if found is None:
        return []
    worst = f"{shown_kl(found.kl_worst)} on {found.worst_text}"
    told = [("KL by text", f"mean {shown_kl(found.kl_mean)}, worst {worst}, in {NAT_UNIT}")]
    if found.abroad is not None and found.kl_own is not None:
        times = f"{found.abroad:.1f} times as much as on the calibration's own kind ({shown_kl(found.kl_own)})"
        told.append(("on other kinds", f"at worst {times}"))
    return told


def print_texts(texts: Sequence[TextLoss], protocol: str = "perplexity") -> None:
    """Print a table with one row per text if a model was evaluated on several; a single text needs none."""
    if len(texts) < 2:
        return
    has_original = texts[0].against is not None
    has_kind = any(text.own_kind is not None for text in texts)
    headers = ["text", *(["calibration"] if has_kind else []), "windows", protocol]
    headers += ["excess", "KL", "top-1"] if has_original else []
    rows = []
    for name, text in zip(short_names([text.name for text in texts]), texts, strict=True):
        row = [
            name,
            *([kind_in_words(text.own_kind)] if has_kind else []),
            f"{text.windows:,}",
            f"{text.perplexity:.4f}",
        ]
        if (lost := text.against) is not None:
            row += [_excess(lost), shown_kl(lost.kl), f"{lost.agreement:.2%}"]
        rows.append(row)
    print_table(headers, rows, title="Text by text" + (f", excess and KL in {NAT_UNIT}" if has_original else ""))


def print_evaluations(result: Evaluations) -> None:
    """Several models, or one on tasks: a row for every measure, a column for every model."""
    names = short_names([found.model for found in result.models])
    texts = {_text(found.text) for found in result.models if found.text is not None}
    print_fields([("data", text) for text in sorted(texts)])
    on_text, on_tasks = _text_rows(result.models), _task_rows(result.models)
    is_beside = any(found.text is not None and found.text.against is not None for found in result.models)
    title = f"Excess loss and KL in {NAT_UNIT}" if is_beside else None
    if on_tasks:
        print_table(("", "n", "shots", "metric", *names), [*on_text, *on_tasks], title=title)
    else:
        rows = [(label, windows, *cells) for label, windows, _, *cells in on_text]
        print_table(("", "windows", "metric", *names), rows, title=title)
    for name, found in zip(names, result.models, strict=True):
        if any(part is not None and part.depends_on_batch for part in (found.text, found.tasks)):
            print_fields([("note", f"{name}: {BATCH_DEPENDENT}")])
        if found.text is not None and found.text.unrelated is not None:
            print_fields([("note", found.text.unrelated)])
        if found.saved is not None:
            print_fields([("saved", found.saved)])


def _text_rows(models: Sequence[Evaluated]) -> list[tuple[str, ...]]:
    texts = [found.text for found in models]
    first = next((text for text in texts if text is not None), None)
    if first is None:
        return []
    measures: dict[str, Callable[[Loss], str]] = {
        first.protocol: lambda loss: f"{loss.perplexity:.4f}",
        "loss (nats per token)": lambda loss: f"{loss.nll:.6f}",
    }
    if first.against is not None:
        measures |= {
            "excess loss": lambda loss: _excess(loss.against) if loss.against else "",
            "KL": lambda loss: shown_kl(loss.against.kl) if loss.against else "",
            "top-1": lambda loss: f"{loss.against.agreement:.2%}" if loss.against else "",
        }
    of_all = "all texts" if len(first.texts) > 1 else "text"
    rows = _measured(of_all, first.windows, measures, texts)
    if len(first.texts) > 1:
        del measures["loss (nats per token)"]
        for number, name in enumerate(short_names([text.name for text in first.texts])):
            losses = [None if found is None else found.texts[number] for found in texts]
            rows += _measured(name, first.texts[number].windows, measures, losses)
    if first.over_texts is not None:
        rows.append(("worst text", "", "", "KL", *(_worst(text) for text in texts)))
    if any(text.own_kind is not None for found in texts if found is not None for text in found.texts):
        rows.append(("calibrated on text like", "", "", "", *(_own_kinds(text) for text in texts)))
    return rows


def _measured(
    label: str, windows: int, measures: Mapping[str, Callable[[Loss], str]], losses: Sequence[Loss | None]
) -> list[tuple[str, ...]]:
    """A row for each measure of one text, or of all together."""
    return [
        (label, f"{windows:,}", "", name, *("" if loss is None else told(loss) for loss in losses))
        for name, told in measures.items()
    ]


def _worst(found: Evaluation | None) -> str:
    return "" if found is None or found.over_texts is None else shown_kl(found.over_texts.kl_worst)


def _own_kinds(found: Evaluation | None) -> str:
    """Names of the texts of whose kind a model's calibration had some, `none of these`, or nothing where it had no
    text."""
    texts = () if found is None else found.texts
    named = zip(short_names([text.name for text in texts]), texts, strict=True)
    own = ", ".join(name for name, text in named if text.own_kind)
    return own or ("none of these" if any(text.own_kind is not None for text in texts) else "")


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
    windows = "one window" if result.windows == 1 else f"{result.windows:,} windows"
    tokens = f"{windows} of {result.sequence_length} tokens"
    if result.begin:
        tokens += f", each after {result.begin}"
    return f"{result.data} ({tokens})"


def _against(found: Divergence) -> list[tuple[str, str]]:
    """How far it is from the original."""
    return [
        ("against", f"{found.model} (perplexity {found.perplexity:.4f}, loss {found.nll:.6f})"),
        ("excess loss", f"{_excess(found)} {NAT_UNIT}"),
        *same_tokens(found),
    ]


def same_tokens(found: Divergence | Likeness) -> list[tuple[str, str]]:
    """Rows for KL divergence (`NAT_UNIT`) and top-1 agreement (percent of tokens) with the original."""
    return [
        ("KL divergence", f"{shown_kl(found.kl)} {NAT_UNIT}"),
        ("top-1 agreement", f"the likeliest next token is the same for {found.agreement:.2%}"),
    ]


def _excess(found: Divergence) -> str:
    return shown_excess(found.excess, found.excess_error)


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
