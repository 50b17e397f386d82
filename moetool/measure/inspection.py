"""What a checkpoint holds, from headers, config and manifest alone."""

from pathlib import Path
from typing import Any

from moetool.checkpoint.counting import parameter_counts
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.reader import MANIFEST
from moetool.format.families import is_opaque
from moetool.job.blueprint import open_for_planning
from moetool.job.job import Source
from moetool.job.writing import original_bytes
from moetool.measure.custom_inspection import inspect_custom
from moetool.runtime.building import check_sizes


def inspect_checkpoint(path: str | Path) -> dict[str, Any]:
    """The summary that `moetool inspect --json` prints. Raises `InvalidInputError` for what cannot be read."""
    checkpoint = open_for_planning(path)
    if is_opaque(checkpoint.config):
        if not checkpoint.is_imagined:
            check_sizes(checkpoint)
        return inspect_custom(path, checkpoint)
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
        "parameters": parameter_counts(reader),
        "bytes": checkpoint.weight_bytes,
        "original_bytes": original,
        "ratio": round(1 - checkpoint.weight_bytes / original, 6),
        "files": len(checkpoint.weight_files),
        "headers": "config.json alone" if checkpoint.is_imagined else "files",
        "recipe": manifest.recipe if manifest is not None else None,
        "depends_on_batch": any(layout.dynamic_channels for layout in reader.layouts.values()),
        "moe": layers,
    }
