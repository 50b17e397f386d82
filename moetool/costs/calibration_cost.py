"""Bytes on the disk and in memory that a calibration text takes while it goes through a model layer by layer."""

from dataclasses import dataclass

import torch

from moetool.architectures import MoEShape
from moetool.architectures.base import whole_number
from moetool.calibration.boundaries import batch_size, boundaries_at_once
from moetool.checkpoint.experts import ExpertReader
from moetool.costs.layer_memory import LayerMemory, Measuring, attention_bytes, layer_numbers
from moetool.runtime.dense import DenseModel

# Tokens of the proof that a conversion is right.
_FEW = 256


def baseline() -> int:
    """Bytes of anonymous memory that Python, torch and transformers take beside what a job computes.

    Measured on a processor: 320 to 350 MB before any work, and up to 70 MB more while a tokenizer cuts calibration
    text, which are free again for the work. With a card it is a guess.
    """
    return 600_000_000 if torch.cuda.is_available() else 400_000_000


@dataclass(frozen=True)
class CalibrationCost:
    """Sizes of a calibration on `samples` windows of `length` tokens.

    Attributes:
        samples, length: windows, and tokens in each.
        itemsize: bytes of a number in the dtype that the model runs in.
        kept_itemsize: bytes of a number in the dtype that hidden states are kept in.
        gradient_samples: the windows that gradients are taken on.
    """

    samples: int
    length: int
    itemsize: int
    kept_itemsize: int = 4
    gradient_samples: int = 0

    def boundary_bytes(self, hidden: int) -> int:
        """Bytes of the hidden states of the whole calibration set at one layer boundary."""
        return self.samples * self.length * hidden * self.kept_itemsize

    def forward_bytes(self, hidden: int) -> int:
        """Peak bytes on the disk while the set goes forward through the model."""
        return 2 * self.boundary_bytes(hidden)

    def gradient_bytes(self, hidden: int, layers: int) -> int:
        """Peak bytes on the disk while the windows with gradients go forward through `layers`, and back."""
        one = self.gradient_samples * self.length * hidden * self.kept_itemsize
        return boundaries_at_once(layers) * one

    def dense_memory_bytes(self, dense: DenseModel, *, runs: bool, calibrated: bool) -> int:
        """Estimated peak bytes of anonymous memory of converting a dense model, which `runs` layer by layer in fp32,
        and if `calibrated` on the whole calibration text."""
        matrix = dense.hidden * dense.intermediate
        if not runs:
            return baseline() + 4 * 3 * matrix
        prefixes, tensors = dense.architecture.layer_prefixes, dense.checkpoint.tensors
        sizes = {name: info.nbytes // info.dtype.itemsize for name, info in tensors.items()}
        layer = max(sum(size for name, size in sizes.items() if name.startswith(prefix)) for prefix in prefixes)
        rest = sum(size for name, size in sizes.items() if not name.startswith(prefixes))
        read = sum(info.nbytes for name, info in tensors.items() if not name.startswith(prefixes))
        tokens = self.length * batch_size(self.samples, self.length) if calibrated else _FEW
        activations = 4 * tokens * (16 * dense.hidden + 5 * dense.intermediate)
        logits = 3 * 4 * _FEW * int(dense.config.vocab_size)
        return baseline() + 4 * (rest + layer + 3 * matrix) + read + activations + logits

    def layer_memory(self, experts: ExpertReader, *measuring: Measuring, gradients: bool = False) -> LayerMemory:
        """Estimated peak bytes of anonymous memory, by parts, of a job that takes these measurements one after the
        other: all of one layer, one batch, statistics, and what is not a layer."""
        shape, config = experts.shape, experts.checkpoint.settings
        outside, largest, other = layer_numbers(experts)
        windows = batch_size(self.samples, self.length)
        width = 16 * shape.hidden + 5 * shape.top_k * shape.intermediate
        if not gradients:  # nothing is kept for a way back, and experts run one after the other
            width = 8 * shape.hidden + 4 * shape.intermediate
        activations = 4 * windows * self.length * width
        vocabulary = whole_number(config, "vocab_size") or 0
        logits = 4 * 4 * self.length * vocabulary if gradients else 0
        return LayerMemory(
            rest=baseline() + (outside + other) * self.itemsize,
            dense=(largest - other) * self.itemsize,
            passing=max(activations + attention_bytes(config, windows, self.length), logits),
            expert=shape.expert_parameters * self.itemsize,
            experts=shape.experts,
            measuring=measuring or (Measuring(),),
        )

    def forward_scratch(self, experts: ExpertReader, at_once: int, *, sums: bool = False) -> int:
        """Bytes on the disk while the windows go forwards through layers whose experts run so many `at_once`: hidden
        states, and what `_recorded_bytes` adds; with `sums` also the summed activations that some measurements need."""
        recorded = self._recorded_bytes(experts.shape, at_once, gradients=False, sums=sums)
        return self.forward_bytes(experts.architecture.hidden) + recorded

    def backward_scratch(self, experts: ExpertReader, at_once: int) -> int:
        """Bytes on the disk while gradients go backwards through layers whose experts run so many `at_once`."""
        recorded = self._recorded_bytes(experts.shape, at_once, gradients=True, sums=True)
        return self.gradient_bytes(experts.architecture.hidden, experts.architecture.layers) + recorded

    def _recorded_bytes(self, shape: MoEShape, at_once: int, *, gradients: bool, sums: bool) -> int:
        """Bytes of the experts' inputs and outputs in one layer, for `gradients` those of both, and of the `sums` of
        their activations. Zero where all experts are in memory together."""
        if at_once >= shape.experts:
            return 0
        windows = self.gradient_samples if gradients else self.samples
        width = (5 if gradients else 2) * shape.hidden + (shape.intermediate if sums else 0)
        return windows * self.length * width * self.itemsize
