"""Sections of a report on experts: their storage, mergers, neurons and tokens."""

import math
from collections.abc import Mapping, Sequence

from moetool.architectures import ROLES, Role
from moetool.convert.results import Activations
from moetool.measure.inspected import Masks, densities
from moetool.measure.results import RoutingResult
from moetool.report.charts import Bars, Chart, Heat, Values, by_layer, elided
from moetool.report.likeness import pairs
from moetool.report.parts import PageTable, Section, number
from moetool.report.results import MergedExperts, StoredExperts, StoredRole, TextCoverage
from moetool.report.storing import MEASURES

NAMED = 40  # rare experts that a table names
_MEANS = "Errors are means over the experts, as the manifest has them."
_ESTIMATED = (
    "Estimated losses are those of all experts of a layer together. They tell where a model loses most, not how much: "
    "eval --against measures that."
)


def stored(told: StoredExperts) -> Section:
    """Section on how experts are stored: form, bits per weight and error, by layer and role."""
    columns: dict[str, Values] = {}
    if told.measure is not None:
        errors = [each.error for each in told.roles]
        columns[MEASURES[told.measure]] = _percentages(errors) if told.measure == "loss" else errors
    charts = [_by_layer("Bits per weight", told.roles, [each.bits for each in told.roles], "bits per weight")]
    charts += [_by_layer(f"Errors: {name}", told.roles, values, name) for name, values in columns.items()]
    if any(each.largest is not None for each in told.roles):
        columns["largest"] = [each.largest for each in told.roles]
    rows = [
        (
            str(each.layer),
            each.role,
            each.form,
            f"{each.bits:.2f}",
            *(number(values[row]) for values in columns.values()),
        )
        for row, each in enumerate(told.roles)
    ]
    headers = ("layer", "role", "stored as", "bits per weight", *columns)
    lead = "How each layer's experts are stored, bases and scales included, and what that cost."
    return Section(
        name="stored",
        title="Experts as stored",
        lead=lead,
        charts=charts,
        tables=[PageTable(title="By layer and role", headers=headers, rows=rows, words=3)],
        notes=[] if told.measure is None else [_ESTIMATED if told.measure == "loss" else _MEANS],
    )


def _percentages(losses: Values) -> Values:
    """Estimated losses in percent of the sum of all that are known."""
    total = math.fsum(loss for loss in losses if loss is not None)
    return [None if loss is None else 100 * loss / total if total else 0.0 for loss in losses]


def _by_layer(title: str, roles: Sequence[StoredRole], values: Sequence[float | None], axis: str) -> Chart:
    layers = list(dict.fromkeys(each.layer for each in roles))
    found = {(each.layer, each.role): value for each, value in zip(roles, values, strict=True)}
    present: list[Role] = [role for role in ROLES if any(each.role == role for each in roles)]
    series: dict[str, Values] = {role: [found[layer, role] for layer in layers] for role in present}
    return by_layer(title, layers, series, axis)


def merged(told: Sequence[MergedExperts]) -> Section:
    """Section that lists which experts each layer kept, of those it had."""
    rows = [(str(layer.layer), "; ".join("+".join(map(str, one)) for one in layer.made_of)) for layer in told]
    table = PageTable(title="Experts left", headers=("layer", "made of"), rows=rows, words=2)
    lead = "Fewer experts than there were. Those of the original that each is made of, joined with +."
    return Section(name="left", title="Experts left", lead=lead, tables=[table])


def landed(masks: Masks) -> Section:
    """Section of a SIMoE model: density of each layer's masks, and their overlap."""
    places = [(site.place, site) for site in masks.moe]
    layers = list(dict.fromkeys(layer for (layer, _), _ in places))
    kinds = list(dict.fromkeys(kind for (_, kind), _ in places))
    found = dict(places)
    union = [[site.union_density if (site := found.get((layer, kind))) else None for kind in kinds] for layer in layers]
    charts: list[Chart] = [
        Heat(
            title="Channels that any expert opens",
            values=union,
            rows=layers,
            columns=[kind.removesuffix("_proj") for kind in kinds],
            row_axis="layer",
            column_axis="linear layer",
            axis="share of channels",
            least=0,
            most=1,
        ),
        pairs("Overlap of experts", masks.overlap, "share in common"),
    ]
    rows = [
        (name, *(f"{density:.1%}" for density in densities(sites)))
        for name, sites in [
            *((f"layer {layer}", [site for (own, _), site in places if own == layer]) for layer in layers),
            *((kind, [site for (_, own), site in places if own == kind]) for kind in kinds),
        ]
    ]
    return Section(
        name="landed",
        title="Where experts landed",
        lead=f"An expert opens {masks.mean_density:.1%} of all channels, any of them {masks.union_density:.1%}.",
        charts=charts,
        tables=[PageTable(title="Open channels", headers=("where", "per expert", "any expert"), rows=rows)],
        notes=["Overlap: the share of an expert's channels (rows) that another (columns) opens, too."],
    )


def neurons(activations: Mapping[int, Activations]) -> Section:
    """Section on a moefied model: energy held by its experts, and the share of it that the selector finds."""
    told, labels = list(activations.values()), [str(layer) for layer in activations]
    shares = {
        "chosen experts": [each.captured for each in told],
        "best choice": [each.captured_by_oracle for each in told],
        "selector's accuracy": [each.selector_accuracy for each in told],
    }
    sparsity = {
        "near zero": [each.soft_sparsity for each in told],
        "near their mean": [each.soft_sparsity_centred for each in told],
    }
    charts: list[Chart] = []
    known = {name: values for name, values in shares.items() if any(value is not None for value in values)}
    if known:
        charts.append(by_layer("Energy in the chosen experts", list(activations), known, "share"))
    charts.append(by_layer("Activations that are small", list(activations), sparsity, "share"))
    headers = ("layer", *known, *sparsity)
    columns: list[Values] = [*known.values(), *sparsity.values()]
    rows = [(label, *(_percent(values[row]) for values in columns)) for row, label in enumerate(labels)]
    mean = Activations.mean(told)
    lead = f"{mean.soft_sparsity:.1%} of the activations are near zero"
    if mean.captured is not None:
        lead += f"; the chosen experts hold {mean.captured:.1%} of their energy"
    if mean.captured_by_oracle is not None:
        lead += f", the best choice of as many {mean.captured_by_oracle:.1%}"
    return Section(
        name="neurons",
        title="Neurons as experts",
        lead=f"{lead}.",
        charts=charts,
        tables=[PageTable(title="By layer", headers=headers, rows=rows)],
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


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
    lead = (
        "In every layer a router chooses a few experts for each token. A share tells how many of a layer's choices "
        "fall on one expert; the shares of a layer add up to 100 %."
    )
    notes = ["Rare: less than a tenth of an even share. What such an expert was measured on says little about it."]
    if len(rare) > NAMED:
        notes.append(f"Named are the {NAMED} rarest of {len(rare)}.")
    return Section(name="routing", title="Routing and coverage", lead=lead, charts=charts, tables=tables, notes=notes)


def _means(coverage: Sequence[TextCoverage]) -> Bars | None:
    """Mean shares over the layers, of texts with as many experts; nothing for more than bars can show."""
    experts = len(coverage[0].shares[0])
    if experts * len(coverage) > 64 or any(len(text.shares[0]) != experts for text in coverage):
        return None
    series = {text.text: [sum(column) / len(column) for column in zip(*text.shares, strict=True)] for text in coverage}
    labels = [str(expert) for expert in range(experts)]
    return Bars(title="Share of each expert", labels=labels, series=series, label_axis="expert", axis="mean share")
