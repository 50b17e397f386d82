"""Inspects a checkpoint with custom modules."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.format.kinds import custom_module
from moetool.format.kinds.base import CustomModule, Mask
from moetool.format.kinds.moefied import MoefiedSpec
from moetool.measure.inspected import Files, Inspection, MaskedLayer, Masks, MoELayer, ParameterCounts, StoredLayers
from moetool.numerics.hard_concrete import median_gate


def inspect_custom(path: str | Path, checkpoint: Checkpoint, files: Files) -> Inspection:
    """Inspect a checkpoint with custom modules, for `moetool inspect`."""
    config = checkpoint.config
    spec = custom_module(config)
    assert spec is not None
    dense = find_dense_architecture(config)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
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
