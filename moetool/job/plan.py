"""Plan of a job, from file headers and config alone: bytes read and written, peak memory, work by phase."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moetool.calibration.boundaries import TOKENS_PER_BATCH, kept_dtype
from moetool.calibration.cutting import DRAWING
from moetool.checkpoint.sizes import format_bytes
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import USABLE, LayerMemory
from moetool.costs.phases import Phase
from moetool.errors import ResourceError, UsageError
from moetool.job.job import Source, pick_compute_dtype, pick_device
from moetool.job.options import CalibrationOptions, RunOptions, TextOptions
from moetool.job.processes import processes
from moetool.job.result import Json
from moetool.runtime.memory import free_bytes, total_bytes
from moetool.version import __version__


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
        advice: what to do where memory is too little, if it is something of this stage alone.
    """

    stage: str
    input_bytes: int
    output_bytes: int
    scratch_bytes: int
    memory_bytes: int
    phases: tuple[Phase, ...] = ()
    details: Mapping[str, Json] = field(default_factory=dict)
    advice: str = ""

    @property
    def disk_bytes(self) -> int:
        """Peak disk space that the job takes, in bytes: output and scratch files together."""
        return self.output_bytes + self.scratch_bytes

    @property
    def experts_at_once(self) -> int | None:
        """Experts of a layer that are in memory at once; `None` for a job that does not go through MoE layers."""
        found = self.details.get("experts_at_once")
        return found if isinstance(found, int) else None

    def to_json(self) -> dict[str, Json]:
        """Return the plan's fields as `--dry-run --json` prints them; sizes are in bytes."""
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
        if self.details.get("own_text_memory_bytes") == self.memory_bytes:
            return "The model writes its own text (`self`) whole in memory, not layer by layer: give another text."
        if self.advice:
            return self.advice
        if memory is None and (self.experts_at_once or 1) > 1:
            return "With --memory, say of what is free, it works on fewer experts at a time."
        least = (
            "That is the least it works with: 0.4 GB for Python and its libraries, embeddings and head, a "
            f"layer with one of its experts, and a batch of {TOKENS_PER_BATCH:,} tokens or one longer window. "
        )
        return ("" if self.experts_at_once is None else least) + "Close other programs, or raise --memory."


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
    made_by = {"version": __version__, "drawing": DRAWING}
    content = {"stage": stage, "sources": dict(sources), "options": dict(options), **made_by}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def text_cost(text: TextOptions | None, computed: torch.dtype, stored: torch.dtype) -> CalibrationCost:
    """The cost of the text that options name (of none, if there are no options), for a model that is stored in one
    dtype and computed in another."""
    kept = kept_dtype(stored, computed).itemsize
    if text is None:
        return CalibrationCost(0, 1, computed.itemsize, kept)
    few = text.gradient_samples if isinstance(text, CalibrationOptions) else text.samples
    return CalibrationCost(text.samples, text.sequence_length, computed.itemsize, kept, min(few, text.samples))


def calibration_cost(
    source: Source, options: RunOptions, text: TextOptions | None, *, gradients: bool = False
) -> CalibrationCost:
    """The calibration cost of a job with these options on an MoE model, on a text if there is one."""
    stored, device = source.experts.dtype, pick_device(options.device)
    return text_cost(text, pick_compute_dtype(options.compute_dtype, device, stored, gradients=gradients), stored)


def experts_at_once(memory: LayerMemory, options: RunOptions) -> int:
    """Choose how many experts of a layer are in memory at once: as many as fit into `--memory`, by default the share
    `USABLE` of the machine's memory, and at least one. Several processes hold all experts, as they sum their statistics
    in one go.

    Memory that is free at the moment has no say: sums are formed in the order of these sets, so two runs of one command
    have to choose alike. For that reason, too, a resumed run keeps the number that it began with.

    Raises:
        UsageError: it began with fewer than all, and several processes are to go on.
    """
    kept = options.experts_at_once
    if processes() > 1:
        if kept is not None and kept < memory.experts:
            raise UsageError(
                f"This run was begun by one process, with {kept} of {memory.experts} experts of a layer in memory at "
                f"a time, and several need all at once. Go on with one process, or start again with --overwrite."
            )
        return memory.experts
    if kept is not None:
        return min(kept, memory.experts)
    return memory.at_once(usable_bytes(options))


def usable_bytes(options: RunOptions) -> int:
    """Bytes that a job goes by where memory decides how it computes: `--memory`, by default the share `USABLE` of the
    machine's. What is free at the moment has no say, so that two runs of one command compute alike."""
    return int(USABLE * total_bytes()) if options.memory is None else options.memory
