"""Section of a report on routing: shares of each text, and experts that few tokens reach."""

from collections.abc import Sequence

from moetool.measure.results import RoutingResult
from moetool.report.charts import Bars, Chart, Heat, elided
from moetool.report.parts import PageTable, Section
from moetool.report.results import TextCoverage

NAMED = 40  # rare experts that a table names


def reached(coverage: Sequence[TextCoverage], routing: RoutingResult | None) -> Section:
    """Section of expert shares and rarely reached experts, text by text."""
    charts: list[Chart] = [
        Heat(
            title=f"Share of each expert: {elided(text.text)}",
            values=text.shares,
            rows=[str(layer) for layer in text.layers],
            columns=[str(expert) for expert in range(len(text.shares[0]))],
            row_axis="layer",
            column_axis="expert",
            axis="share",
            least=0,
        )
        for text in coverage
        if len(text.shares) > 1
    ]
    if (means := _means(coverage)) is not None:
        charts.append(means)
    tables = [
        PageTable(
            title="Coverage",
            headers=("text", "least", "most", "rare experts", "without a token"),
            rows=[
                (
                    text.text,
                    f"{min(map(min, text.shares)):.2%}",
                    f"{max(map(max, text.shares)):.2%}",
                    f"{len(text.rare)} of {sum(map(len, text.shares))}",
                    str(text.unreached),
                )
                for text in coverage
            ],
        )
    ]
    rare = [(text.text, found) for text in coverage for found in text.rare]
    if rare:
        tables.append(
            PageTable(
                title="Experts that few tokens reach",
                headers=("text", "layer", "expert", "share"),
                rows=[
                    (text, str(found.layer), str(found.expert), f"{found.share:.3%}")
                    for text, found in sorted(rare, key=lambda each: each[1].share)[:NAMED]
                ],
            )
        )
    if routing is not None and routing.clustering is not None:
        names = [text.name for text in routing.data]
        tables.append(
            PageTable(
                title="How far the choices of texts are apart (0: the same, 1: nothing in common)",
                headers=("text", *names),
                rows=[
                    (name, *(f"{value:.3f}" for value in row))
                    for name, row in zip(names, routing.clustering.distances, strict=True)
                ],
            )
        )
    notes = ["Rare: less than a tenth of an even share. What such an expert was measured on says little about it."]
    if len(rare) > NAMED:
        notes.append(f"Named are the {NAMED} rarest of {len(rare)}.")
    return Section(name="routing", title="Routing and coverage", charts=charts, tables=tables, notes=notes)


def _means(coverage: Sequence[TextCoverage]) -> Bars | None:
    """Mean shares over the layers, of texts with as many experts; nothing for more than bars can show."""
    experts = len(coverage[0].shares[0])
    if experts * len(coverage) > 64 or any(len(text.shares[0]) != experts for text in coverage):
        return None
    series = {text.text: [sum(column) / len(column) for column in zip(*text.shares, strict=True)] for text in coverage}
    labels = [str(expert) for expert in range(experts)]
    return Bars(title="Share of each expert", labels=labels, series=series, label_axis="expert", axis="mean share")
