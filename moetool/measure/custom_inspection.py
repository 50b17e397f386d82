"""What a checkpoint with modules of moetool's own holds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moetool.architectures import own_modules
from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.reader import MANIFEST, Checkpoint
from moetool.numerics.hard_concrete import median_gate


@dataclass(frozen=True)
class _Found:
    """What one kind of module says of itself.

    Attributes:
        kind: as people say it.
        rule: how experts are chosen.
        top_k: experts at work per token.
        idle: numbers that one token does not use.
        added: numbers that the dense model has not.
        layers: an entry per layer or site.
        more: further entries of the summary.
    """

    kind: str
    rule: str
    top_k: int
    idle: float
    added: int
    layers: list[dict[str, Any]]
    more: dict[str, Any] = field(default_factory=dict)


def inspect_own(path: str | Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """The summary that `moetool inspect --json` prints of such a checkpoint."""
    config = checkpoint.config
    kind, entry = next(iter(own_modules(config).items()))
    dense = find_dense_architecture({**config, "quantization_config": None})
    sizes = {name: math.prod(info.shape) for name, info in checkpoint.tensors.items()}
    guards = sum(info.shape == (1, 1) for info in checkpoint.tensors.values())
    found = _KINDS[kind](checkpoint, dense, entry)
    down = _down(checkpoint, dense)
    total = sum(sizes.values()) - guards
    return {
        "path": str(path),
        "model_type": config["model_type"],
        "architecture": f"{dense.name}, {found.kind}",
        "router_rule": found.rule,
        "layers": config.get("num_hidden_layers", config.get("n_layer")),
        "moe_layers": len(entry["layers"]) if "layers" in entry else config.get("num_hidden_layers"),
        "experts": int(entry["experts"]),
        "top_k": found.top_k,
        "hidden_size": down.shape[0],
        "intermediate_size": down.shape[1],
        "dtype": str(down.dtype).removeprefix("torch."),
        "parameters": {
            "total": total,
            "active": total - round(found.idle),
            "stored": sum(sizes.values()),
            "added": found.added,
        },
        "bytes": checkpoint.weight_bytes,
        "original_bytes": checkpoint.weight_bytes,
        "ratio": 0.0,
        "files": len(checkpoint.weight_files),
        "headers": "config.json alone" if checkpoint.is_imagined else "files",
        "recipe": read_manifest(checkpoint.path).recipe if (checkpoint.path / MANIFEST).exists() else None,
        "moe": found.layers,
        **found.more,
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


def _numbers(checkpoint: Checkpoint, part: str) -> int:
    return sum(math.prod(info.shape) for name, info in checkpoint.tensors.items() if part in name)


def _native(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"layer": layer, "representation": "native"} for layer in entry["layers"]]


def _adapters(checkpoint: Checkpoint, dense: DenseArchitecture, entry: Mapping[str, Any]) -> _Found:
    experts, top_k = int(entry["experts"]), int(entry["top_k"])
    adapters = _numbers(checkpoint, ".adapters.")
    routers = sum(
        math.prod(checkpoint.info(f"{dense.ffn_prefix(layer)}gate.weight").shape) for layer in entry["layers"]
    )
    return _Found(
        "adapters as experts (PESC)",
        "top-k, softmax over the k",
        top_k,
        (1 - top_k / experts) * adapters,
        adapters + routers,
        _native(entry),
    )


def _interpolated(checkpoint: Checkpoint, dense: DenseArchitecture, entry: Mapping[str, Any]) -> _Found:
    """Densities: the share of channels that an expert's mask leaves open, on average, and that any does."""
    parts = (".delta", ".log_phi", ".fixed_gates", ".columns", ".interpolation.")
    added = sum(_numbers(checkpoint, part) for part in parts)
    rule = "softmax over all masks, one mix per prompt"
    experts = int(entry["experts"])
    if checkpoint.is_imagined:
        return _Found("interpolated experts (SIMoE)", rule, experts, 0, added, [])
    layers: list[dict[str, Any]] = []
    overlap, opened, channels, kept = torch.zeros(experts, experts), torch.zeros(experts), 0, 0
    for name in checkpoint.tensors:
        site, _, kind = name.rpartition(".")
        if kind not in ("log_phi", "fixed_gates"):
            continue
        stored = checkpoint.read(name).float()
        gates = median_gate(stored) if kind == "log_phi" else stored
        width, is_open = checkpoint.info(f"{site}.linear.weight").shape[1], (gates != 0).float()
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
    more = {
        "mean_density": round(opened.mean().item() / channels, 6),
        "union_density": round(kept / channels, 6),
        "overlap": [[round(value, 4) for value in row] for row in ratio.tolist()],
    }
    return _Found("interpolated experts (SIMoE)", rule, experts, 0, added, layers, more)


def _neurons(checkpoint: Checkpoint, dense: DenseArchitecture, entry: Mapping[str, Any]) -> _Found:
    experts = int(entry["experts"])
    chosen = max(1, round(float(entry["keep"]) * experts))
    outputs = f"{'down' if dense.spread else dense.weights['down'].removesuffix('.weight')}.bias"  # no neuron's
    prefixes = [f"{dense.ffn_prefix(layer)}ffn." for layer in entry["layers"]]
    neurons = sum(_numbers(checkpoint, prefix) - _numbers(checkpoint, prefix + outputs) for prefix in prefixes)
    added = sum(_numbers(checkpoint, f"{dense.ffn}.{part}") for part in ("selector.", "centre", "order"))
    rule = {"mlp": "a small network", "oracle": "an oracle"}.get(str(entry["selector"]), "a fixed order")
    return _Found(
        "neurons as experts (moefied)",
        f"the highest scores by {rule}",
        chosen,
        (1 - chosen / experts) * neurons,
        added,
        _native(entry),
    )


_KINDS: dict[str, Callable[[Checkpoint, DenseArchitecture, Mapping[str, Any]], _Found]] = {
    "adapter_experts": _adapters,
    "interpolated": _interpolated,
    "neuron_experts": _neurons,
}
