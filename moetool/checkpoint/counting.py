"""Parameter counts of an MoE model: total, active per token, stored."""

import math

from moetool.checkpoint.decoded import decoded
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.format.kinds.base import PLACEHOLDER


def numbers_in_files(checkpoint: Checkpoint) -> int:
    """Numbers that a model's files hold, without placeholders; packed codes count as the bytes that they are in."""
    return sum(math.prod(info.shape) for info in checkpoint.tensors.values() if info.shape != PLACEHOLDER)


def parameter_counts(reader: ExpertReader) -> dict[str, int]:
    """Count the parameters of a checkpoint: all of them, and those that one token uses.

    `stored` counts those in the files. `total` counts the weights these stand for, every expert in full; tensors that
    are tied count once. `active` is the part of `total` that one token uses: everything but the experts, and `top_k`
    experts per MoE layer. `added` is what the experts have beyond one dense FFN per layer, in numbers of 16 bits as the
    DeRS paper counts them (Tables S13 to S18): deltas without scales and indices.
    """
    shapes = [info.shape for name, info in decoded(reader.checkpoint).tensors.items() if name not in reader.names]
    other = sum(math.prod(shape) for shape in shapes if shape != PLACEHOLDER)
    layers, shape = reader.moe_layers, reader.shape
    total = other + sum(reader.count(layer) for layer in layers) * shape.expert_parameters
    idle = len(layers) * (shape.experts - shape.top_k) * (shape.expert_parameters + shape.bias_parameters)
    return {
        "total": total,
        "active": total - idle,
        "stored": numbers_in_files(reader.checkpoint),
        "added": round(sum(reader.layout(layer).added_parameters() for layer in layers)),
    }
