"""Sections of a report on the experts' weights (`--analysis`): energy of singular values, similarity, sensitivity."""

from collections.abc import Iterator, Sequence

from moetool.architectures import Role
from moetool.measure.inspected import Analysis, LayerAnalysis, RoleAnalysis, Similarity
from moetool.report.charts import Heat, Lines, Values, by_layer
from moetool.report.parts import PageTable, Section, number

_Each = tuple[LayerAnalysis, Role, RoleAnalysis]


def analysed(told: Analysis) -> Iterator[Section]:
    """Sections for similarity, energy and sensitivity, as far as the analysis has each."""
    every: list[_Each] = [(layer, role, entry) for layer in told.layers for role, entry in layer.roles.items()]
    roles = list(dict.fromkeys(role for _, role, _ in every))
    rows = [
        (str(layer.layer), role, name, *(f"{value:.3f}" for value in values))
        for layer, role, entry in every
        for name, values in _energies(entry).items()
    ]
    yield Section(
        name="energy",
        title="Energy of singular values",
        lead="The share of Σσ² that the largest singular values hold: the higher, the fewer ranks carry a matrix.",
        charts=[_retained(told, role) for role in roles],
        tables=[
            PageTable(
                title="Energy, by the share of singular values",
                headers=("layer", "role", "of", *(f"{share} %" for share in told.shares)),
                rows=rows,
                words=3,
            )
        ],
        notes=told.notes,
    )
    if any(len(entry.cka.matrix) > 1 for _, _, entry in every):
        yield _similarity(every)
    if any(layer.sensitivity is not None for layer in told.layers):
        yield _sensitivity(told, roles)


def _energies(entry: RoleAnalysis) -> dict[str, Sequence[float]]:
    """Energies that are defined, by the matrix that they are of."""
    energy = entry.energy
    found = {"experts": energy.experts, f"{entry.base} base": energy.base, "deltas": energy.delta}
    return {name: values for name, values in found.items() if values is not None}


def _retained(told: Analysis, role: Role) -> Lines:
    """Chart of the retained energy by share of the rank, averaged over the layers."""
    by_name: dict[str, list[Sequence[float]]] = {}
    for layer in told.layers:
        for name, values in _energies(layer.roles[role]).items():
            by_name.setdefault(name, []).append(values)
    series = {name: [sum(at) / len(at) for at in zip(*curves, strict=True)] for name, curves in by_name.items()}
    return Lines(
        title=f"Energy of {role}, mean over the layers",
        at=told.shares,
        series=series,
        at_axis="largest singular values, %",
        axis="share of energy",
    )


def _similarity(every: Sequence[_Each]) -> Section:
    layers = list(dict.fromkeys(layer.layer for layer, _, _ in every))
    shown = {layers[0], layers[len(layers) // 2], layers[-1]}
    rows = [
        (str(layer.layer), role, *map(_summary, (entry.cka, entry.cka_v, entry.cka_u))) for layer, role, entry in every
    ]
    return Section(
        name="similarity",
        title="Similarity of experts",
        lead="Linear CKA of every two experts: 1 is the same up to scale and rotation, 0 is nothing in common.",
        charts=[
            pairs(f"Layer {layer.layer}, {role}", entry.cka.matrix, "CKA")
            for layer, role, entry in every
            if layer.layer in shown
        ],
        tables=[
            PageTable(
                title="CKA, mean (least … most)",
                headers=("layer", "role", "experts", "factors V", "factors U"),
                rows=rows,
                words=2,
            )
        ],
        notes=["Drawn are the first, the middle and the last layer."] if len(layers) > len(shown) else [],
    )


def pairs(title: str, matrix: Sequence[Values], axis: str) -> Heat:
    """Heat map of a similarity of experts, `[experts][experts]`, without its diagonal."""
    values = [[None if i == j else value for j, value in enumerate(row)] for i, row in enumerate(matrix)]
    names = [str(expert) for expert in range(len(matrix))]
    return Heat(
        title=title, values=values, rows=names, columns=names, row_axis="expert", column_axis="expert", axis=axis
    )


def _summary(found: Similarity | None) -> str:
    if found is None or found.mean is None:
        return "–"
    return f"{found.mean:.3f} ({found.min:.3f} … {found.max:.3f})"


def _sensitivity(told: Analysis, roles: Sequence[Role]) -> Section:
    layers = [layer.layer for layer in told.layers]
    series: dict[str, Values] = {role: [layer.roles[role].sensitivity for layer in told.layers] for role in roles}
    return Section(
        name="sensitivity",
        title="Sensitivity",
        lead="What errors of the same relative size cost, in units that compare layers and roles but are no nats.",
        charts=[by_layer("Sensitivity", layers, series, "cost of errors", log=True)],
        tables=[
            PageTable(
                title="By layer",
                headers=("layer", "all", *roles),
                rows=[
                    (
                        str(layer.layer),
                        *map(number, (layer.sensitivity, *(layer.roles[role].sensitivity for role in roles))),
                    )
                    for layer in told.layers
                ],
            )
        ],
    )
