"""Bytes of a model by kind of tensor; representation, bits per weight and errors of its experts by layer and role."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import cast

from moetool.architectures import Role
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.format.layout import LayerLayout, base_name, delta_name, shared_name
from moetool.job.result import Json, significant
from moetool.measure.inspected import Masks, StoredLayers
from moetool.report.results import StoredExperts, StoredRole
from moetool.representations import Representation, describe

# What a stage notes of errors, one of these, and what is shown of it.
MEASURES = {
    "lost_energy": "energy lost",
    "relative_error": "relative error",
    "loss": "share of all experts' estimated loss, %",
}
_DIGITS = 3


def stored_experts(reader: ExpertReader, told: StoredLayers | Masks) -> StoredExperts | None:
    """Storage of the experts by layer and role; `None` if all are in the model's original layout.

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
            error=significant(sum(numbers) / len(numbers)) if numbers else None,
            largest=significant(max(numbers)) if len(numbers) > 1 else None,
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


# The first that a name holds says what it is; experts are told apart before.
_KINDS = (
    (r"\.delta$", "deltas"),
    (r"\.(log_phi|fixed_gates|columns)$", "masks"),
    (r"\.adapters\.", "adapters"),
    (r"\.selector\.|\.ffn_?\w*\.(centre|order)$|\.(mlp|ffn)\.(centre|order)$", "selectors"),
    (r"shared_(expert|mlp)", "shared experts"),
    (r"\.interpolation\.|\.gate\.(weight|bias|e_score\w*)$|router", "routers"),
    (r"embed|\bwte\b|\bwpe\b|lm_head", "embeddings"),
    (r"norm|\bln_|layernorm", "norms"),
    (r"attn|attention", "attention"),
    (r"experts", "experts"),
    (r"mlp|ffn|feed_forward|\.fc\d|intermediate|\.output\.", "feed-forward networks"),
)


def bytes_by_kind(checkpoint: Checkpoint, reader: ExpertReader | None) -> dict[str, int]:
    """Bytes of all tensors in the files by kind, the largest first.

    Args:
        checkpoint: of any model.
        reader: of its experts, if they are whole networks.
    """
    named = {} if reader is None else dict(_experts(reader))
    found: Counter[str] = Counter()
    for name, info in checkpoint.tensors.items():
        held = checkpoint.stored_parts([name]).values() if name in checkpoint.forms else (info,)
        found[named.get(name) or _kind(name)] += sum(own.nbytes for own in held)
    return dict(found.most_common())


def _kind(name: str) -> str:
    return next((kind for pattern, kind in _KINDS if re.search(pattern, name, re.IGNORECASE)), "others")


def _experts(reader: ExpertReader) -> Iterator[tuple[str, str]]:
    """Every tensor that stores experts or chooses them, and what it is."""
    architecture = reader.architecture
    for layer in reader.moe_layers:
        layout, prefix = reader.layout(layer), architecture.experts_prefix(layer)
        own = dict(_own(layout))
        native = {
            architecture.weight_name(layer, expert, role): "experts" if layout.weights[role] is None else "bases"
            for role in reader.shape.roles
            for expert in range(reader.shape.experts)
        }
        for spec in reader.specs(layer):
            yield spec.name, native.get(spec.name) or own.get(spec.name.removeprefix(prefix), "bases")
        yield architecture.router_name(layer), "routers"
        for name in architecture.shared_expert_names(layer).values():
            yield name, "shared experts"


def _own(layout: LayerLayout) -> Iterator[tuple[str, str]]:
    """What moetool's own tensors are, by their names relative to the experts; of all but bases."""
    for role, forms in layout.weights.items():
        shape = layout.shape.matrix(role)
        for expert, form in enumerate(forms or ()):
            kind = _stored_as(form, is_delta=form.uses_base and layout.has_base(role))
            for tensor in form.tensors(shape):
                yield delta_name(expert, role, tensor), kind
            for tensor in form.shared_tensors(shape):
                yield shared_name(role, tensor), kind
    for role, base in layout.compact_bases():
        for tensor in base.tensors(layout.base_shape(role)):
            yield base_name(role, tensor), "bases"


def _stored_as(form: Representation, *, is_delta: bool) -> str:
    return f"{'deltas' if is_delta else 'experts'}, {form.kind}"
