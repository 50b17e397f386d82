"""What a job will read, compute and write, from file headers and config alone."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch

from moetool.architectures import MoEShape
from moetool.architectures.base import whole_number
from moetool.calibration.boundaries import batch_size, boundaries_at_once, kept_dtype
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.sizes import format_bytes
from moetool.errors import ResourceError
from moetool.job.job import Source, pick_compute_dtype, pick_device
from moetool.job.layer_memory import LayerMemory, Measuring, attention_bytes, layer_numbers
from moetool.job.options import CalibrationOptions, RunOptions, TextOptions
from moetool.job.result import Json
from moetool.job.work import Phase
from moetool.runtime.dense import DenseModel
from moetool.runtime.memory import free_bytes
from moetool.version import __version__

# Tokens of the proof that a conversion is right.
_FEW = 256
# Python, torch and transformers themselves, before any work.
_BASELINE = 600_000_000
# The same on a processor where a model goes through layer by layer: measured, 300 to 400 MB, and up to 180 MB for a
# moment or left over from it while a tokenizer is at work.
_STREAMING = 470_000_000


@dataclass(frozen=True)
class Plan:
    """Costs of a job, known before it starts. All sizes in bytes.

    Attributes:
        stage: which stage.
        input_bytes: weight files to read.
        output_bytes: weight files to write, exactly where `exact`, else at most.
        scratch_bytes: room for unfinished work beside the output, removed at the end.
        memory_bytes: estimated peak of anonymous memory.
        phases: what will be done, under the names that progress shows; none if it cannot be told.
        details: more that a reader wants to know, in order.
    """

    stage: str
    input_bytes: int
    output_bytes: int
    scratch_bytes: int
    memory_bytes: int
    phases: tuple[Phase, ...] = ()
    details: Mapping[str, Json] = field(default_factory=dict)

    @property
    def disk_bytes(self) -> int:
        """Peak disk use: output and scratch."""
        return self.output_bytes + self.scratch_bytes

    @property
    def experts_at_once(self) -> int | None:
        """How many experts of a layer are in memory together; `None` for a job that does not go through such layers."""
        found = self.details.get("experts_at_once")
        return found if isinstance(found, int) else None

    def to_json(self) -> dict[str, Json]:
        """For `--dry-run --json`."""
        return {
            "stage": self.stage,
            "input_bytes": self.input_bytes,
            "output_bytes": self.output_bytes,
            "scratch_bytes": self.scratch_bytes,
            "disk_bytes": self.disk_bytes,
            "peak_memory_bytes": self.memory_bytes,
            **self.details,
        }

    def check(self, output: Path, *, memory: int | None, disk: int | None, kept: int | None = None) -> None:
        """Refuse a job that cannot end well, with the numbers.

        Args:
            output: where it would write.
            memory: bytes that it may use; `None` for what is free.
            disk: as `memory`, of the output's disk.
            kept: the number of experts in memory together that a run began with, and is gone on with.

        Raises:
            ResourceError: more memory or disk is needed than allowed or there.
        """
        available = free_bytes() if memory is None else memory
        if self.memory_bytes > available:
            raise ResourceError(
                f"This job needs about {format_bytes(self.memory_bytes)} of memory and has {format_bytes(available)}. "
                + self._advice(memory, kept)
            )
        there = next(place for place in (output, *output.parents) if place.exists())
        free = shutil.disk_usage(there).free if disk is None else disk
        written = bytes_below(output)  # by an earlier, interrupted run
        if self.disk_bytes - written > free:
            raise ResourceError(
                f"This job needs {format_bytes(self.disk_bytes)} of disk in {there} ({format_bytes(self.output_bytes)} "
                f"for the result, {format_bytes(self.scratch_bytes)} while it works) and has {format_bytes(free)}."
            )

    def shortage(self, output: Path, *, memory: int | None, disk: int | None) -> str | None:
        """Why a job would be refused for what is free at the moment, where no limit was given; `None` if it would not.

        Raises:
            ResourceError: it needs more than a limit that was given.
        """
        self.check(output, memory=sys.maxsize if memory is None else memory, disk=sys.maxsize if disk is None else disk)
        try:
            self.check(output, memory=memory, disk=disk)
        except ResourceError as error:
            return str(error)
        return None

    def _advice(self, memory: int | None, kept: int | None) -> str:
        """What to do where there is too little memory."""
        if kept is not None:
            return (
                f"It began with {kept} experts of a layer in memory together, and keeps to that for the same bytes. "
                "Give it more (--memory), or start again with --overwrite."
            )
        if memory is None and (self.experts_at_once or 1) > 1:
            return "With --memory, say of what is free, it works on fewer experts at a time."
        return "Fewer or shorter calibration windows (--samples, --sequence-length) need less."


def bytes_below(directory: Path) -> int:
    """Bytes of all files in a directory, some of which may go meanwhile."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # another run may be at work there
                total += (Path(root) / name).stat().st_size
    return total


def fingerprint(stage: str, sources: Mapping[str, str], options: Mapping[str, object]) -> str:
    """Hash of everything that decides the result; `--resume` refuses to mix two of them."""
    content = {"stage": stage, "sources": dict(sources), "options": dict(options), "version": __version__}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class CalibrationCost:
    """What calibrating on `samples` windows of `length` tokens takes."""

    samples: int
    length: int
    itemsize: int
    kept_itemsize: int = 4
    gradient_samples: int = 0

    @classmethod
    def of(cls, options: TextOptions | None, computed: torch.dtype, stored: torch.dtype) -> Self:
        """Of the text that options name (of none, if there are no options), for a model that is stored in one dtype and
        computed in another."""
        kept = kept_dtype(stored, computed).itemsize
        if options is None:
            return cls(0, 1, computed.itemsize, kept)
        few = options.gradient_samples if isinstance(options, CalibrationOptions) else options.samples
        return cls(options.samples, options.sequence_length, computed.itemsize, kept, min(few, options.samples))

    def boundary_bytes(self, hidden: int) -> int:
        """Hidden states of the whole calibration set at one layer boundary."""
        return self.samples * self.length * hidden * self.kept_itemsize

    def forward_bytes(self, hidden: int) -> int:
        """Most that is on the disk at any time while the set goes forward through the model."""
        return 2 * self.boundary_bytes(hidden)

    def gradient_bytes(self, hidden: int, layers: int) -> int:
        """The same while the part that gradients are taken on goes forward through `layers`, and back."""
        one = self.gradient_samples * self.length * hidden * self.kept_itemsize
        return boundaries_at_once(layers) * one

    def dense_memory_bytes(self, dense: DenseModel, *, runs: bool, calibrated: bool) -> int:
        """Estimated peak of anonymous memory of converting a dense model, which `runs` layer by layer in fp32, and if
        `calibrated` on the whole calibration text."""
        matrix = dense.hidden * dense.intermediate
        if not runs:
            return _BASELINE + 4 * 3 * matrix
        prefixes = tuple(dense.architecture.layer_prefix(layer) for layer in range(dense.layers))
        tensors = dense.checkpoint.tensors
        sizes = {name: info.nbytes // info.dtype.itemsize for name, info in tensors.items()}
        layer = max(sum(size for name, size in sizes.items() if name.startswith(prefix)) for prefix in prefixes)
        rest = sum(size for name, size in sizes.items() if not name.startswith(prefixes))
        read = sum(info.nbytes for name, info in tensors.items() if not name.startswith(prefixes))
        tokens = self.length * batch_size(self.samples, self.length) if calibrated else _FEW
        activations = 4 * tokens * (16 * dense.hidden + 5 * dense.intermediate)
        logits = 3 * 4 * _FEW * int(dense.config.vocab_size)
        return _BASELINE + 4 * (rest + layer + 3 * matrix) + read + activations + logits

    def layer_memory(self, experts: ExpertReader, *measuring: Measuring, gradients: bool = False) -> LayerMemory:
        """Estimated peak of anonymous memory, by parts, of a job that measures this, one after the other: all of one
        layer, one batch, statistics, and what is not a layer."""
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
            rest=(_BASELINE if torch.cuda.is_available() else _STREAMING) + (outside + other) * self.itemsize,
            dense=(largest - other) * self.itemsize,
            passing=max(activations + attention_bytes(config, windows, self.length), logits),
            expert=shape.expert_parameters * self.itemsize,
            experts=shape.experts,
            measuring=measuring or (Measuring(),),
        )

    def recorded_bytes(self, shape: MoEShape, *, gradients: bool, sums: bool) -> int:
        """What is on the disk beside the hidden states while a layer's experts run on what they were given: that, and
        what they give; for `gradients` these of both; for some measurements the `sums` of their activations."""
        windows = self.gradient_samples if gradients else self.samples
        width = (5 if gradients else 2) * shape.hidden + (shape.intermediate if sums else 0)
        return windows * self.length * width * self.itemsize


def calibration_cost(
    source: Source, options: RunOptions, text: TextOptions | None, *, gradients: bool = False
) -> CalibrationCost:
    """Of a job with these options on an MoE model, on a text if there is one."""
    stored, device = source.experts.dtype, pick_device(options.device)
    return CalibrationCost.of(
        text, pick_compute_dtype(options.compute_dtype, device, stored, gradients=gradients), stored
    )
