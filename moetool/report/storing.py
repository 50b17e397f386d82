"""Storage of a model's experts: representation, bits per weight and errors, by layer and role."""

from collections.abc import Iterator, Mapping
from typing import cast

from moetool.architectures import Role
from moetool.checkpoint.experts import ExpertReader
from moetool.format.layout import LayerLayout
from moetool.job.result import Json
from moetool.measure.inspected import Masks, StoredLayers
from moetool.report.results import StoredExperts, StoredRole
from moetool.representations import describe

# What a stage notes of errors, one of these, and what it is in words.
MEASURES = {"lost_energy": "energy lost", "relative_error": "relative error", "loss": "estimated loss, nats"}
_DIGITS = 3


def stored_experts(reader: ExpertReader, told: StoredLayers | Masks) -> StoredExperts | None:
    """Of every layer and role; `None` where all experts are as another reader knows them.

    Args:
        reader: of the experts.
        told: what `inspect` found, the manifest's notes among it.
    """
    if all(reader.layout(layer).is_native for layer in reader.moe_layers) or isinstance(told, Masks):
        return None
    said: dict[int, Mapping[str, Json]] = {layer.layer: layer.said or {} for layer in told.moe}
    measure = next((name for name in MEASURES if any(name in notes for notes in said.values())), None)
    roles = [row for layer in reader.moe_layers for row in _rows(reader, layer, measure, said.get(layer, {}))]
    return StoredExperts(measure=measure, roles=roles)


def _rows(reader: ExpertReader, layer: int, measure: str | None, said: Mapping[str, Json]) -> Iterator[StoredRole]:
    layout = reader.layout(layer)
    noted = said.get(measure) if measure else None
    errors = cast(Mapping[Role, Json], noted) if isinstance(noted, dict) else {}
    for role in reader.shape.roles:
        forms = layout.weights[role]
        found = errors.get(role)
        values = [found] if isinstance(found, int | float) else found if isinstance(found, list) else []
        numbers = [float(cast(float, value)) for value in values]
        yield StoredRole(
            layer=layer,
            role=role,
            form="native" if forms is None else describe(forms),
            bits=round(_bits(reader, layout, role), _DIGITS),
            error=_significant(sum(numbers) / len(numbers)) if numbers else None,
            largest=_significant(max(numbers)) if len(numbers) > 1 else None,
        )


def _bits(reader: ExpertReader, layout: LayerLayout, role: Role) -> float:
    """On disk per weight of all experts: of deltas, and of a base that has its share of them all."""
    forms, shape, dtype = layout.weights[role], reader.shape.matrix(role), reader.dtype
    if forms is None:
        return 8 * dtype.itemsize
    stored = sum(form.nbytes(shape, dtype) for form in forms)
    stored += sum(tensor.nbytes(dtype) for tensor in layout.shared_tensors(role).values())
    if layout.has_base(role):
        stored += layout.base[role].nbytes(layout.base_shape(role), dtype)
    return 8 * stored / (len(forms) * shape[0] * shape[1])


def _significant(value: float) -> float:
    return float(f"{value:.4g}")
