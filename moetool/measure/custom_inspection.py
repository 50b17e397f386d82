"""What a checkpoint with custom modules holds."""

import math
from pathlib import Path
from typing import Any

import torch

from moetool.architectures.base import whole_number
from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.reader import MANIFEST, Checkpoint
from moetool.format.kinds import custom_module
from moetool.format.kinds.simoe import GATES, LINEAR, MASKS, SimoeSpec
from moetool.numerics.hard_concrete import median_gate


def inspect_custom(path: str | Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """The summary that `moetool inspect --json` prints of such a checkpoint."""
    config = checkpoint.config
    spec = custom_module(config)
    assert spec is not None
    dense = find_dense_architecture(config)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    counts = spec.counts(dense, shapes)
    down = _down(checkpoint, dense)
    layers = whole_number(config, "num_hidden_layers", "n_layer")
    moe_layers = spec.among(layers or 0)
    native = [{"layer": layer, "representation": "native"} for layer in moe_layers]
    return {
        "path": str(path),
        "model_type": config["model_type"],
        "architecture": f"{dense.name}, {spec.title}",
        "router_rule": spec.rule,
        "layers": layers,
        "moe_layers": len(moe_layers),
        "experts": spec.experts,
        "top_k": spec.at_work,
        "hidden_size": down.shape[0],
        "intermediate_size": down.shape[1],
        "dtype": str(down.dtype).removeprefix("torch."),
        "parameters": {
            "total": counts.total,
            "active": counts.active,
            "stored": sum(math.prod(shape) for shape in shapes.values()),
            "added": counts.added,
        },
        "bytes": checkpoint.weight_bytes,
        "original_bytes": checkpoint.weight_bytes,
        "ratio": 0.0,
        "files": len(checkpoint.weight_files),
        "headers": "config.json alone" if checkpoint.is_imagined else "files",
        "recipe": read_manifest(checkpoint.path).recipe if (checkpoint.path / MANIFEST).exists() else None,
        **(_densities(checkpoint, spec) if isinstance(spec, SimoeSpec) else {"moe": native}),
    }


def _down(checkpoint: Checkpoint, dense: DenseArchitecture) -> TensorInfo:
    """The down matrix of some expert or network, wherever it lies."""
    name = dense.weights["down"].removesuffix(".weight")
    ends: tuple[str, ...] = (f"{name}.weight", f"{name}.linear.weight", "experts.down_proj")
    if dense.spread is not None:
        ends = (".ffn.down.weight",)
    inside = f".{dense.ffn}."  # attention may have a matrix of that name too
    found = (info for tensor, info in checkpoint.tensors.items() if inside in tensor and tensor.endswith(ends))
    return next(info for info in found if info.shape[-1] > 1)


def _densities(checkpoint: Checkpoint, spec: SimoeSpec) -> dict[str, Any]:
    """The share of channels that an expert's mask leaves open, on average, and that any does: by linear layer, and of
    the whole model with the overlap of every two experts."""
    if checkpoint.is_imagined:
        return {"moe": []}
    experts = spec.experts
    layers: list[dict[str, Any]] = []
    overlap, opened, channels, kept = torch.zeros(experts, experts), torch.zeros(experts), 0, 0
    for name in checkpoint.tensors:
        site, _, kind = name.rpartition(".")
        if kind not in (MASKS, GATES):
            continue
        stored = checkpoint.read(name).float()
        gates = median_gate(stored) if kind == MASKS else stored
        width, is_open = checkpoint.info(f"{site}.{LINEAR}.weight").shape[1], (gates != 0).float()
        overlap += is_open @ is_open.T
        opened += is_open.sum(1)
        channels += width
        kept += int(is_open.any(0).sum())
        layers.append(
            {
                "site": site,
                "representation": "masks",
                "channels": width,
                "mean_density": round(is_open.sum().item() / (experts * width), 6),
                "union_density": round(is_open.any(0).sum().item() / width, 6),
            }
        )
    ratio = overlap / opened[:, None].clamp_min(1)
    return {
        "moe": layers,
        "mean_density": round(opened.mean().item() / channels, 6),
        "union_density": round(kept / channels, 6),
        "overlap": [[round(value, 4) for value in row] for row in ratio.tolist()],
    }
