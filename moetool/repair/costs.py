"""Costs of a repair: memory, disk and operations, from headers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from moetool.architectures import Architecture
from moetool.architectures.base import whole_number
from moetool.architectures.dense import DenseArchitecture
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.building_blocks import ModelSize, calibration_backward, calibration_forward, writing
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import Measuring
from moetool.costs.phases import WRITE, Phase, Phases
from moetool.format.beside import TENSORS, quantized_beside, quantized_name, weight_of
from moetool.format.kinds.moefied import is_selector
from moetool.job.job import Source
from moetool.job.plan import experts_at_once
from moetool.numerics.work import Work
from moetool.repair.options import RANK, RepairOptions, Trained
from moetool.repair.teacher import ENTRY_BYTES, ROUTED_BYTES, TOKEN_BYTES
from moetool.runtime.dense import DenseModel
from moetool.runtime.loading import loading_memory

NOTE, REPAIR = "Original", "Repair"
_SCALES = TENSORS[1]
# Activations of a token in hidden sizes: of a layer that is being computed again, and of one that is kept whole.
_KEPT, _KEPT_WHOLE = 60, 40

# Of a layer in fp32: itself and the pieces that it is read in; and what is made of it and its gradient.
_READ, _CHANGED = 2, 2

# Of each trained number, beside itself: its copy, its gradient there and in the model, two means of Adam, the input's
# value, and the best so far with the one before it.
TRAINED_BYTES = 32
# Of a training beside the parts that are counted: measured, 60 MB, in buffers of gradients and of compiled kernels.
TRAINING_BYTES = 100_000_000


def trained_numbers(source: Source, trains: Trained) -> int:
    """Numbers of a model that can change, those that `training.choose` takes: its routers; with `small` also its
    vectors (norms, biases) and what its compressed matrices are made of beside codes; with `all`, all but embeddings
    and head; with `lora`, what is added to these, too."""
    architecture, reader = source.architecture, source.experts
    whole = {
        architecture.weight_name(layer, expert, role)
        for layer in reader.moe_layers
        for role, forms in reader.layout(layer).weights.items()
        if forms is None
        for expert in range(reader.shape.experts)
    }
    routers = tuple(architecture.router_name(layer).removesuffix("weight") for layer in reader.moe_layers)
    beside = {quantized_name(weight_of(module), _SCALES) for module in quantized_beside(source.checkpoint.settings)}
    ends = {weight_of(module) for module in architecture.embeddings}

    made = reader.names - whole

    def changing(name: str, shape: Sequence[int]) -> int:
        numbers = math.prod(shape)
        if len(shape) > 1 and numbers == 1:
            return 0  # a placeholder
        if name.startswith(routers):
            return numbers
        if trains in ("all", "lora"):
            return 0 if name in ends else low_rank_numbers(shape) if trains == "lora" else numbers
        is_small = name in made or name in beside or len(shape) == 1
        return numbers if is_small and trains == "small" else 0

    return sum(
        changing(name, info.shape) for name, info in source.checkpoint.tensors.items() if info.dtype.is_floating_point
    )


def low_rank_numbers(shape: Sequence[int]) -> int:
    """Numbers of what is added to a tensor, a matrix or several `[…, rows, columns]`, or of the tensor if it is not
    larger than what would be added."""
    return math.prod(shape[:-2]) * RANK * sum(shape[-2:]) if has_low_rank(shape) else math.prod(shape)


def has_low_rank(shape: Sequence[int]) -> bool:
    """Whether a product of two thin matrices is fewer numbers than the matrices of a tensor of this shape."""
    return len(shape) > 1 and min(shape[-2:]) > RANK


def _stored_scales(checkpoint: Checkpoint) -> int:
    """Numbers in 16 bits or more in what another tool has stored in few bits: scales, most of which can change. With
    these, a matrix's gradient and its product with that are in memory at once, of all experts of a layer together."""
    parts = checkpoint.stored_parts(checkpoint.forms).values()
    return sum(math.prod(info.shape) for info in parts if info.dtype.is_floating_point and info.dtype.itemsize > 1)


def noted_bytes(windows: int, length: int, k: int, routed: int) -> int:
    """Bytes of the original's predictions of so many windows, the `k` likeliest tokens of each position, and what its
    routers say of `routed` experts, those of all layers."""
    return windows * length * (k * ENTRY_BYTES + TOKEN_BYTES + routed * ROUTED_BYTES)


def activation_bytes(hidden: int, layers: int, tokens: int, *, again: bool = True) -> int:
    """Bytes of what is kept of a batch on its way through all layers: what enters each, and one layer on the way back;
    or all of it, where layers do not run `again`."""
    return 4 * tokens * hidden * (2 * layers + _KEPT if again else _KEPT_WHOLE * layers)


def decoded_size(source: Source) -> int:
    """Bytes of all experts that are not stored in numbers, in fp32."""
    reader = source.experts
    coded = [layer for layer in reader.moe_layers if not reader.layout(layer).is_native]
    return 4 * len(coded) * reader.shape.expert_parameters * (reader.shape.experts + 1)


@dataclass(frozen=True)
class StreamedOriginal:
    """The original, as it goes through the windows with one layer in memory at a time.

    Attributes:
        checkpoint, architecture: of the original.
        memory: bytes of memory at its peak.
        scratch: bytes on the disk of hidden states between layers.
        experts_at_once: of a layer, in memory together; `None` if it has no experts.
    """

    checkpoint: Checkpoint
    architecture: Architecture | DenseArchitecture
    memory: int
    scratch: int
    experts_at_once: int | None = None

    @classmethod
    def of_experts(cls, source: Source, windows: int, beside: int, options: RepairOptions) -> Self:
        """An MoE model and so many windows, with so many bytes in memory `beside` a layer."""
        cost = CalibrationCost(windows, options.sequence_length, torch.float32.itemsize)
        memory = cost.layer_memory(source.experts, Measuring(common=beside))
        at_once = experts_at_once(memory, options)
        scratch = cost.forward_scratch(source.experts, at_once)
        return cls(source.checkpoint, source.architecture, memory.nbytes(at_once), scratch, at_once)

    @classmethod
    def of_dense(cls, dense: DenseModel, windows: int, beside: int, options: RepairOptions) -> Self:
        """A dense model and so many windows, with so many bytes in memory `beside` a layer."""
        cost = CalibrationCost(windows, options.sequence_length, torch.float32.itemsize)
        memory = cost.dense_memory_bytes(dense, runs=True, calibrated=True) + beside
        return cls(dense.checkpoint, dense.architecture, memory, cost.forward_bytes(dense.hidden))


@dataclass(frozen=True)
class TrainedModel:
    """Sizes of a model that is to be trained, as far as memory goes.

    Attributes:
        loaded: bytes of the model in memory.
        trained: numbers that change.
        decoded: bytes of all experts that are stored as codes or factors, in fp32.
    """

    loaded: int
    trained: int
    decoded: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the model and what is kept of each number that changes, with codes as they are stored."""
        return self.loaded + TRAINED_BYTES * self.trained

    @classmethod
    def of(cls, source: Source, trains: Trained) -> Self:
        """The sizes of a compressed model, from its headers."""
        memory, trained = loading_memory(source.checkpoint, torch.float32), trained_numbers(source, trains)
        scales = _stored_scales(source.checkpoint) if trains == "small" else 0
        changed = _CHANGED * memory.layer if scales or trains == "lora" else 0
        return cls(memory.needed + changed, trained + scales, decoded_size(source))

    @classmethod
    def streamed(cls, checkpoint: Checkpoint, trained: int, *, changes: bool) -> Self:
        """The sizes of a model of which one layer is in memory at a time, by how many numbers of it are trained.
        Something may be made of each layer's weights, which `changes` them."""
        memory = loading_memory(checkpoint, torch.float32)
        return cls(memory.outside + (_READ + _CHANGED * changes) * memory.layer, trained, 0)

    @classmethod
    def of_moefied(cls, checkpoint: Checkpoint, trains: Trained) -> Self:
        """The sizes of a moefied model, from its headers: vectors (norms, biases, neurons' representative values) can
        change, and with `all` the matrices but embeddings, head and selectors."""
        vocabulary = whole_number(checkpoint.settings, "vocab_size")

        def changing(name: str, shape: Sequence[int]) -> int:
            numbers = math.prod(shape)
            if numbers == 1 or is_selector(name):
                return 0  # or a placeholder
            if len(shape) == 1:
                return numbers
            if trains == "small" or shape[0] == vocabulary:
                return 0
            return low_rank_numbers(shape) if trains == "lora" else numbers

        trained = sum(
            changing(name, info.shape) for name, info in checkpoint.tensors.items() if info.dtype.is_floating_point
        )
        memory = loading_memory(checkpoint, torch.float32)
        return cls(memory.needed + (_CHANGED * memory.layer if trains == "lora" else 0), trained, 0)

    @classmethod
    def most(cls, source: Source, nbytes: int, share: float, trains: Trained) -> Self:
        """The largest sizes of what a compression can make of a model: `nbytes` of weight files, with a `share` of the
        experts' bytes in numbers of floating point. Only of experts that are stored in full it `trains` more than what
        is small."""
        if trains == "lora":
            memory = loading_memory(source.checkpoint, torch.float32)
            return cls(
                nbytes * 4 // source.dtype.itemsize + _CHANGED * memory.layer, trained_numbers(source, trains), 0
            )
        reader, item = source.experts, source.dtype.itemsize
        experts = max(0, nbytes - source.bytes_beside_experts)
        decoded = 4 * len(reader.moe_layers) * reader.shape.expert_parameters * (reader.shape.experts + 1)
        beside = trained_numbers(source, trains)
        if trains == "all":
            beside -= sum(math.prod(source.checkpoint.info(name).shape) for name in reader.names)
        numbers = nbytes - experts + round(share * experts)  # codes stay as they are stored
        return cls(nbytes - numbers + numbers * 4 // item, round(share * experts / item) + beside, decoded)


def repair_phases(
    size: ModelSize, options: RepairOptions, windows: int, written: int, tensors: int, again: Work | None = None
) -> Phases:
    """The phases of a repair, for which an original of this size predicts so many windows: forwards, then for each step
    forwards, again, and backwards, with evaluations before and between; and writing so many bytes of so many
    tensors. What is not in memory is read `again` in every pass, which is that work."""
    read = CalibrationCost(windows, options.sequence_length, 4)
    trained = CalibrationCost(options.steps * options.batch_size, options.sequence_length, 4)
    evaluations = 1 + min(options.evaluations, options.steps)
    held_out = CalibrationCost(evaluations * 2 * options.held_out, options.sequence_length, 4)
    steps = calibration_forward(trained, size) + calibration_backward(trained, size)
    steps += calibration_forward(held_out, size)
    if again is not None:
        batches = 2 * -(-options.held_out // options.batch_size)
        steps += again * (2 * options.steps + evaluations * batches)
    return (
        Phase(NOTE, calibration_forward(read, size)),
        Phase(REPAIR, steps),
        Phase(WRITE, writing(0, written, tensors)),
    )
