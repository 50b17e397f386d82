"""Costs of a repair: memory, disk and operations, from headers."""

import math

from moetool.costs.building_blocks import calibration_backward, calibration_forward, moe_size, writing
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.phases import WRITE, Phase, Phases
from moetool.job.job import Source
from moetool.repair.options import RepairOptions
from moetool.repair.teacher import ENTRY_BYTES, TOKEN_BYTES

NOTE, REPAIR = "Original", "Repair"
_KEPT = 60  # activations of a token of a layer that is being computed again, in hidden sizes

# Of each trained number, beside itself: its copy, its gradient there and in the model, two means of Adam, the input's
# value, and the best so far with the one before it.
TRAINED_BYTES = 32


def trained_numbers(source: Source, train: str) -> int:
    """The most numbers of a model that can change: all that are of floating point, or those beside attention,
    embeddings and experts in full."""
    tensors, reader = source.checkpoint.tensors, source.experts
    native = {layer for layer in reader.moe_layers if reader.layout(layer).is_native}
    full = tuple(reader.architecture.experts_prefix(layer) for layer in native)
    return sum(
        math.prod(info.shape)
        for name, info in tensors.items()
        if info.dtype.is_floating_point
        and (train == "all" or len(info.shape) == 1 or "gate" in name or name in reader.names)
        and (train == "all" or not full or not name.startswith(full))
    )


def noted_bytes(windows: int, length: int, k: int) -> int:
    """Bytes of the original's predictions of so many windows, the `k` likeliest tokens of each position."""
    return windows * length * (k * ENTRY_BYTES + TOKEN_BYTES)


def activation_bytes(source: Source, tokens: int) -> int:
    """Bytes of what is kept of a batch on its way through all layers, and of one layer on the way back."""
    return 4 * tokens * source.architecture.hidden * (2 * source.architecture.layers + _KEPT)


def decoded_size(source: Source) -> int:
    """Bytes of all experts that are not stored in numbers, in fp32."""
    reader = source.experts
    coded = [layer for layer in reader.moe_layers if not reader.layout(layer).is_native]
    return 4 * len(coded) * reader.shape.expert_parameters * (reader.shape.experts + 1)


def repair_phases(source: Source, original: Source, options: RepairOptions, windows: int) -> Phases:
    """The phases of a repair, for which the original predicts so many windows: forwards, then for each step forwards,
    again, and backwards, and writing."""
    read = CalibrationCost(windows, options.sequence_length, 4)
    trained = CalibrationCost(options.steps * options.batch_size, options.sequence_length, 4)
    size, checkpoint = moe_size(original.experts), source.checkpoint
    steps = calibration_forward(trained, size) + calibration_backward(trained, size)
    return (
        Phase(NOTE, calibration_forward(read, size)),
        Phase(REPAIR, steps),
        Phase(WRITE, writing(0, checkpoint.weight_bytes, len(checkpoint.tensors))),
    )
