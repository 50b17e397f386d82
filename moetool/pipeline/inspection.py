"""What a checkpoint holds, from headers, config and manifest alone."""

from pathlib import Path
from typing import Any

from moetool.architectures import is_opaque
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.reader import MANIFEST
from moetool.integrations.building import check_sizes
from moetool.pipeline.blueprint import open_for_planning
from moetool.pipeline.job import Source
from moetool.pipeline.output import original_bytes
from moetool.pipeline.own_inspection import inspect_own
from moetool.representations.layout import GUARD


def parameter_counts(source: Source) -> dict[str, int]:
    """Numbers in the model.

    `stored` counts what the files hold. `total` counts the weights these stand for, every expert in full; tensors that
    are tied count once. `active` is the part of `total` that one token uses: everything but the experts, and `top_k`
    experts per MoE layer. `added` is what the experts have beyond one dense FFN per layer, in numbers of 16 bits as the
    DeRS paper counts them (Tables S13 to S18): differences without scales and indices.
    """
    reader, tensors = source.experts, source.checkpoint.tensors
    sizes = {name: info.nbytes // info.dtype.itemsize for name, info in tensors.items()}
    guards = sum(info.shape == GUARD for name, info in tensors.items() if name not in reader.names)
    other = sum(size for name, size in sizes.items() if name not in reader.names) - guards
    layers, shape = reader.moe_layers, reader.shape
    total = other + sum(reader.count(layer) for layer in layers) * shape.expert_parameters
    idle = len(layers) * (shape.experts - shape.top_k) * (shape.expert_parameters + shape.bias_parameters)
    return {
        "total": total,
        "active": total - idle,
        "stored": sum(sizes.values()),
        "added": round(sum(reader.layout(layer).added_parameters() for layer in layers)),
    }


def inspect_checkpoint(path: str | Path) -> dict[str, Any]:
    """The summary that `moetool inspect --json` prints. Raises `InvalidInputError` for what cannot be read."""
    checkpoint = open_for_planning(path)
    if is_opaque(checkpoint.config):
        if not checkpoint.is_imagined:
            check_sizes(checkpoint)
        return inspect_own(path, checkpoint)
    source = Source.of(checkpoint)
    reader = source.experts
    manifest = read_manifest(checkpoint.path) if (checkpoint.path / MANIFEST).exists() else None
    layers = []
    for layer in reader.moe_layers:
        layout = reader.layout(layer)
        entry: dict[str, Any] = {
            "layer": layer,
            "representation": "native" if layout.is_native else "shared-base",
            "stored_parameters": layout.stored_parameters(),
        }
        if not layout.is_native:
            entry["base_channels"] = layout.base_channels
            entry["dynamic_channels"] = layout.dynamic_channels
            for role in reader.shape.roles:
                weights = layout.weights[role]
                entry[role] = "native" if weights is None else [weight.spec for weight in weights]
        if manifest is not None:
            entry.update(manifest.layers.get(str(layer), {}))
        layers.append(entry)
    original = original_bytes(source)
    return {
        "path": str(path),
        "model_type": checkpoint.config["model_type"],
        "architecture": source.architecture.name,
        "router_rule": source.architecture.router_rule,
        "layers": source.architecture.layers(checkpoint.config),
        "moe_layers": len(reader.moe_layers),
        "experts": reader.shape.experts,
        "top_k": reader.shape.top_k,
        "hidden_size": reader.shape.hidden,
        "intermediate_size": reader.shape.intermediate,
        "dtype": str(reader.dtype).removeprefix("torch."),
        "parameters": parameter_counts(source),
        "bytes": checkpoint.weight_bytes,
        "original_bytes": original,
        "ratio": round(1 - checkpoint.weight_bytes / original, 6),
        "files": len(checkpoint.weight_files),
        "headers": "config.json alone" if checkpoint.is_imagined else "files",
        "recipe": manifest.recipe if manifest is not None else None,
        "depends_on_batch": any(layout.dynamic_channels for layout in reader.layouts.values()),
        "moe": layers,
    }
