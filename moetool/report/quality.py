"""Section of a report on what the model predicts, beside its original."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from moetool.measure.results import (
    NAT_UNIT,
    OWN_KIND_ALONE,
    Evaluation,
    TextLoss,
    kind_in_words,
    short_names,
    shown_excess,
    shown_kl,
)
from moetool.report.charts import Bars, Chart, begun
from moetool.report.parts import PageTable, Section, number
from moetool.report.results import Report


def best_evaluation(report: Report) -> Evaluation | None:
    """The evaluation measured now, or else the last one recorded or saved of this model, one beside its original before
    others; `None` if there is none."""
    if report.evaluation is not None:
        return report.evaluation
    place = Path(report.model).resolve()
    given = () if report.recorded is None else report.recorded.evaluations
    own = [*report.saved, *(found for found in given if Path(found.model).resolve() == place)]
    return max(reversed(own), key=lambda found: found.against is not None, default=None)


def quality(report: Report) -> Section | None:
    """Section of perplexity, excess loss and KL divergence, beside the original's."""
    recorded = () if report.recorded is None else report.recorded.evaluations
    every = [*([] if report.evaluation is None else [report.evaluation]), *report.saved, *recorded]
    tables = []
    if every:
        headers = ("model", "perplexity", "original's", "excess", "KL", "top-1 agreement", "text")
        title = f"Perplexity; excess and KL in {NAT_UNIT}"
        tables.append(PageTable(title=title, headers=headers, rows=[_evaluated(found) for found in every]))
    best = best_evaluation(report)
    charts = []
    if best is not None and len(best.texts) > 1:
        tables.append(_text_by_text(best))
        if best.against is not None:
            charts.append(_divergences(best))
    losses = [*_proofs(report)]
    if losses:
        tables.append(
            PageTable(
                title="Proof of the conversion, nats per token",
                headers=("stage", "loss of the dense model", "of the result", "with the experts kept"),
                rows=losses,
            )
        )
    if not tables:
        return None
    notes = [
        "Excess: the model's loss less the original's, ± its standard error. KL: divergence from the original's "
        "predictions, 0 where they are identical."
    ]
    notes += [] if best is None else _of_kinds(best)
    return Section(name="quality", title="Quality", charts=charts, tables=tables, notes=notes if every else [])


def _text_by_text(found: Evaluation) -> PageTable:
    """Losses on each of several texts, and whether calibration had text of its kind."""
    headers = ("text", "calibration", "windows", "perplexity", "original's", "excess", "KL", "top-1 agreement")
    rows = [
        (name, kind_in_words(text.own_kind) or "–", f"{text.windows:,}", *_losses(text)) for name, text in _named(found)
    ]
    return PageTable(title=f"Text by text; excess and KL in {NAT_UNIT}", headers=headers, rows=rows, words=2)


def _divergences(found: Evaluation) -> Chart:
    """KL divergence on each text; those of the calibration's own kind beside the others."""
    series: dict[str, Sequence[float | None]] = {}
    for label, own in (("calibration's own kind", True), ("other kinds", False), ("KL", None)):
        lost = [1000 * text.against.kl if text.against and text.own_kind is own else None for text in found.texts]
        if any(value is not None for value in lost):
            series[label] = lost
    labels = [begun(name) for name, _ in _named(found)]
    return Bars(
        title="KL divergence by text",
        labels=labels,
        series=series,
        label_axis="text",
        axis=NAT_UNIT,
        lying=True,
    )


def _named(found: Evaluation) -> Iterator[tuple[str, TextLoss]]:
    return zip(short_names([text.name for text in found.texts]), found.texts, strict=True)


def _of_kinds(found: Evaluation) -> Iterator[str]:
    """What to know of texts that calibration had, and had not."""
    if not found.calibration:
        return
    named = ", ".join(short_names(found.calibration))
    yield f"Calibrated on {named}. Own kind: that text or another split of it, by name."
    over = found.over_texts
    if over is not None and over.abroad is not None:
        yield f"KL on text of other kinds is at worst {over.abroad:.1f} times what it is on the calibration's own kind."
    elif found.against is not None and all(text.own_kind for text in found.texts):
        yield f"{OWN_KIND_ALONE[0].upper()}{OWN_KIND_ALONE[1:]}."


def _evaluated(found: Evaluation) -> tuple[str, ...]:
    text = f"{found.data} ({found.windows} × {found.sequence_length} tokens)"
    return Path(found.model).name, *_losses(found), text


def _losses(found: Evaluation | TextLoss) -> tuple[str, ...]:
    """Perplexity of the model and of the original, excess loss, KL divergence, agreement."""
    if (beside := found.against) is None:
        return f"{found.perplexity:.4f}", "–", "–", "–", "–"
    return (
        f"{found.perplexity:.4f}",
        f"{beside.perplexity:.4f}",
        shown_excess(beside.excess, beside.excess_error).replace(" ", "\u00a0"),
        shown_kl(beside.kl),
        f"{beside.agreement:.2%}",
    )


def _proofs(report: Report) -> Iterator[tuple[str, ...]]:
    for run in report.runs:
        if run.proof is not None and run.proof.loss_dense is not None:
            yield run.stage, *map(number, (run.proof.loss_dense, run.proof.loss_mixture, run.proof.loss_kept))
