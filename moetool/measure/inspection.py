"""Inspection of a checkpoint from headers, config and manifest alone."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import torch

from moetool.architectures import names_no_experts
from moetool.architectures.base import whole_number
from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.checkpoint.counting import parameter_counts
from moetool.checkpoint.decoded import quantized_tensors
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.manifest import Manifest, manifest_of, noted_in
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.format.beside import quantized_beside
from moetool.format.families import is_opaque
from moetool.format.kinds import custom_module
from moetool.format.kinds.base import CustomModule, Mask
from moetool.format.kinds.moefied import MoefiedSpec
from moetool.job.blueprint import open_for_planning
from moetool.job.job import DenseSource, Source
from moetool.job.result import Json, Keyed
from moetool.job.writing import original_bytes
from moetool.measure.inspected import (
    DenseInspection,
    Files,
    Inspection,
    MaskedLayer,
    Masks,
    MoELayer,
    ParameterCounts,
    QuantizedBeside,
    SharedBase,
    StoredLayers,
)
from moetool.numerics.hard_concrete import median_gate
from moetool.representations import Representation
from moetool.runtime.building import check_sizes


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Inspect a checkpoint with experts.

    Raises:
        InvalidInputError: it cannot be read, or has none.
    """
    return _with_experts(path, open_for_planning(path))


def _with_experts(path: str | Path, checkpoint: Checkpoint) -> Inspection:
    source = None if is_opaque(checkpoint.config) else Source.of(checkpoint)
    if not checkpoint.is_imagined:
        check_sizes(checkpoint)
    manifest = manifest_of(noted_in(checkpoint))
    if source is None:
        return _inspect_custom(path, checkpoint, _files(checkpoint, checkpoint.weight_bytes, manifest))
    reader = source.experts
    return Inspection(
        path=str(path),
        model_type=str(checkpoint.config["model_type"]),
        architecture=source.architecture.name,
        router_rule=source.architecture.router_rule,
        layers=source.architecture.layers,
        moe_layers=len(reader.moe_layers),
        experts=reader.shape.experts,
        top_k=reader.shape.top_k,
        hidden_size=reader.architecture.hidden,
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


def inspect_model(path: str | Path, checkpoint: Checkpoint) -> Inspection | DenseInspection:
    """Inspect a checkpoint, of a model with experts or of a dense one, that was opened at `path`. Raises as
    `inspect_checkpoint`."""
    if custom_module(checkpoint.config) is not None or not names_no_experts(checkpoint.config):
        return _with_experts(path, checkpoint)
    if not checkpoint.is_imagined:
        check_sizes(checkpoint)
    known = DenseSource.if_known(checkpoint)
    dense = None if known is None else known.dense  # else what config.json says in the common words
    config, total = checkpoint.config, sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    return DenseInspection(
        path=str(path),
        model_type=str(config.get("model_type")),
        architecture=str(config.get("model_type")) if dense is None else dense.architecture.name,
        layers=whole_number(config, "num_hidden_layers") if dense is None else dense.layers,
        moe_layers=0,
        experts=0,
        hidden_size=whole_number(config, "hidden_size") if dense is None else dense.hidden,
        intermediate_size=whole_number(config, "intermediate_size") if dense is None else dense.intermediate,
        dtype=str(checkpoint.main_dtype if dense is None else dense.dtype).removeprefix("torch."),
        parameters=ParameterCounts(total=total, active=total, stored=total, added=0),
        files=_files(checkpoint, checkpoint.weight_bytes, manifest_of(noted_in(checkpoint))),
    )


def _beside(checkpoint: Checkpoint) -> QuantizedBeside | None:
    names = quantized_tensors(checkpoint) & checkpoint.tensors.keys()
    modules = quantized_beside(checkpoint.settings)
    bits = sorted({form.bits for form in modules.values()})
    nbytes = sum(checkpoint.tensors[name].nbytes for name in names)
    return QuantizedBeside(len(modules), bits, nbytes) if modules else None


def _files(checkpoint: Checkpoint, original: int, manifest: Manifest | None) -> Files:
    return Files(
        bytes=checkpoint.weight_bytes,
        original_bytes=original,
        ratio=round(1 - checkpoint.weight_bytes / original, 6),
        files=len(checkpoint.weight_files),
        headers="config.json alone" if checkpoint.is_imagined else "files",
        recipe=None if manifest is None else cast(Mapping[str, Json], manifest.recipe),
        stored_as=checkpoint.stored_as,
        gguf_bytes=checkpoint.gguf_bytes,
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


def _inspect_custom(path: str | Path, checkpoint: Checkpoint, files: Files) -> Inspection:
    """Inspect a checkpoint with custom modules, for `moetool inspect`."""
    config = checkpoint.config
    spec = custom_module(config)
    assert spec is not None
    dense = find_dense_architecture(config)
    shapes = checkpoint.shapes
    counts = spec.counts(dense, shapes)
    down, is_transposed = _down(checkpoint, dense, spec)
    hidden, intermediate = down.shape[::-1] if is_transposed else down.shape
    moe_layers = spec.among(dense.layers)
    masks = spec.masks(shapes)
    return Inspection(
        path=str(path),
        model_type=str(config["model_type"]),
        architecture=f"{dense.name}, {spec.title}",
        router_rule=spec.rule,
        layers=dense.layers,
        moe_layers=len(moe_layers),
        experts=spec.experts,
        top_k=spec.at_work,
        hidden_size=hidden,
        intermediate_size=intermediate,
        dtype=str(down.dtype).removeprefix("torch."),
        parameters=ParameterCounts(
            total=counts.total,
            active=counts.active,
            stored=sum(math.prod(shape) for shape in shapes.values()),
            added=counts.added,
        ),
        files=files,
        moe=_networks(moe_layers) if masks is None else _densities(checkpoint, masks, spec.experts),
    )


def _networks(layers: Sequence[int]) -> StoredLayers:
    return StoredLayers(moe=[MoELayer(layer=layer, representation="native") for layer in layers])


def _down(checkpoint: Checkpoint, dense: DenseArchitecture, spec: CustomModule) -> tuple[TensorInfo, bool]:
    """The down matrix of some network, wherever it lies, and whether it is `[in, out]`."""
    for layer in dense.ffn_layers:
        name, inside = dense.weight_name(layer, "down"), dense.linear_paths["down"]
        places = (f"{dense.ffn_prefix(layer)}ffn.{inside}.weight", f"{name.removesuffix('weight')}linear.weight", name)
        if (found := next((place for place in places if place in checkpoint.tensors), None)) is not None:
            is_turned = isinstance(spec, MoefiedSpec) and found == places[0]
            return checkpoint.tensors[found], dense.is_transposed and not is_turned
    raise InvalidInputError(f"{checkpoint.path} has no {dense.weight_name(dense.ffn_layers[0], 'down')}.")


def _densities(checkpoint: Checkpoint, masks: Mapping[str, Mask], experts: int) -> Masks | StoredLayers:
    """The share of channels that an expert's mask leaves open, on average, and that any does: by linear layer, and of
    the whole model with the overlap of every two experts. Nothing for `config.json` alone."""
    if checkpoint.is_imagined:
        return StoredLayers(moe=[])
    layers: list[MaskedLayer] = []
    overlap, opened, channels, kept = torch.zeros(experts, experts), torch.zeros(experts), 0, 0
    for site, mask in masks.items():
        stored = checkpoint.read(mask.tensor).float()
        is_open = ((median_gate(stored) if mask.is_trained else stored) != 0).float()
        overlap += is_open @ is_open.T
        opened += is_open.sum(1)
        channels += mask.channels
        kept += int(is_open.any(0).sum())
        mean = round(is_open.sum().item() / (experts * mask.channels), 6)
        union = round(is_open.any(0).sum().item() / mask.channels, 6)
        layers.append(MaskedLayer(site, "masks", mask.channels, mean, union))
    ratio = overlap / opened[:, None].clamp_min(1)
    return Masks(
        moe=layers,
        mean_density=round(opened.mean().item() / channels, 6),
        union_density=round(kept / channels, 6),
        overlap=[[round(value, 4) for value in row] for row in ratio.tolist()],
    )
