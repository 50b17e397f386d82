"""Inspection of a checkpoint from headers, config and manifest alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from moetool.checkpoint.counting import parameter_counts
from moetool.checkpoint.decoded import quantized_tensors
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.manifest import Manifest, manifest_of
from moetool.checkpoint.reader import Checkpoint
from moetool.format.beside import quantized_beside
from moetool.format.families import is_opaque
from moetool.job.blueprint import open_for_planning
from moetool.job.job import Source
from moetool.job.result import Json, Keyed
from moetool.job.writing import original_bytes
from moetool.measure.custom_inspection import inspect_custom
from moetool.measure.inspected import (
    Files,
    Inspection,
    MoELayer,
    ParameterCounts,
    QuantizedBeside,
    SharedBase,
    StoredLayers,
)
from moetool.representations import Representation
from moetool.runtime.building import check_sizes


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Inspect a checkpoint, for `moetool inspect`.

    Raises:
        InvalidInputError: it cannot be read.
    """
    checkpoint = open_for_planning(path)
    if is_opaque(checkpoint.config):
        if not checkpoint.is_imagined:
            check_sizes(checkpoint)
        return inspect_custom(
            path, checkpoint, _files(checkpoint, checkpoint.weight_bytes, manifest_of(checkpoint.path))
        )
    source = Source.of(checkpoint)
    reader = source.experts
    manifest = manifest_of(checkpoint.path)
    return Inspection(
        path=str(path),
        model_type=str(checkpoint.config["model_type"]),
        architecture=source.architecture.name,
        router_rule=source.architecture.router_rule,
        layers=source.architecture.layers,
        moe_layers=len(reader.moe_layers),
        experts=reader.shape.experts,
        top_k=reader.shape.top_k,
        hidden_size=reader.shape.hidden,
        intermediate_size=reader.shape.intermediate,
        dtype=str(reader.dtype).removeprefix("torch."),
        parameters=ParameterCounts(**parameter_counts(reader)),
        files=_files(checkpoint, original_bytes(source), manifest),
        moe=StoredLayers(
            depends_on_batch=any(layout.dynamic_channels for layout in reader.layouts.values()),
            moe=[_layer(reader, layer, manifest) for layer in reader.moe_layers],
        ),
        beside=_beside(checkpoint),
    )


def _beside(checkpoint: Checkpoint) -> QuantizedBeside | None:
    names = quantized_tensors(checkpoint) & checkpoint.tensors.keys()
    modules = quantized_beside(checkpoint.settings)
    return QuantizedBeside(len(modules), sum(checkpoint.tensors[name].nbytes for name in names)) if modules else None


def _files(checkpoint: Checkpoint, original: int, manifest: Manifest | None) -> Files:
    return Files(
        bytes=checkpoint.weight_bytes,
        original_bytes=original,
        ratio=round(1 - checkpoint.weight_bytes / original, 6),
        files=len(checkpoint.weight_files),
        headers="config.json alone" if checkpoint.is_imagined else "files",
        recipe=None if manifest is None else cast(Mapping[str, Json], manifest.recipe),
        stored_as=checkpoint.stored_as,
    )


def _layer(reader: ExpertReader, layer: int, manifest: Manifest | None) -> MoELayer:
    layout = reader.layout(layer)
    base = None
    if not layout.is_native:
        specs = Keyed((role, _specs(layout.weights[role])) for role in reader.shape.roles)
        base = SharedBase(0 if layout.is_baseless else layout.base_channels, layout.dynamic_channels, specs)
    return MoELayer(
        layer=layer,
        representation="native" if base is None else "no-base" if layout.is_baseless else "shared-base",
        stored_parameters=layout.stored_parameters(),
        base=base,
        said=None if manifest is None else Keyed(cast(Mapping[str, Json], manifest.layers.get(str(layer), {}))),
    )


def _specs(forms: Sequence[Representation] | None) -> Sequence[str] | Literal["native"]:
    return "native" if forms is None else [form.spec for form in forms]
