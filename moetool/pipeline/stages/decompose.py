"""The second stage of D²-MoE alone: experts as base and difference, losing nothing (§3.1, Eq. 3)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor

from moetool.checkpoint.manifest import read_manifest
from moetool.errors import InvalidInputError, UsageError
from moetool.pipeline.bases import LayerBase, base_path, unweighted_base
from moetool.pipeline.factored import base_tensors
from moetool.pipeline.job import Job
from moetool.pipeline.options import RunOptions
from moetool.pipeline.output import OutputPlan, entry_for, write_model
from moetool.pipeline.plan import CalibrationCost, Plan
from moetool.pipeline.stage import Stage
from moetool.representations.dense import Dense
from moetool.representations.layout import LayerLayout, delta_name


class DecomposeOptions(RunOptions):
    """Against which base."""

    base: str = Field("mean", description="A base written by fisher-merge, or `mean`.")


class Decompose(Stage[DecomposeOptions]):
    """Adds a base to every MoE layer.

    A difference is kept as the expert's own weight beside the base. That is the same information in the same bytes, and
    it is exact: the difference of two bf16 numbers usually is not a bf16 number.
    """

    name: ClassVar[str] = "decompose"
    summary: ClassVar[str] = "split experts into a shared base and differences, without loss"
    options_type: ClassVar[type[RunOptions]] = DecomposeOptions

    def _output_plan(self) -> OutputPlan:
        reader = self.source.experts
        layout = LayerLayout.uniform(reader.shape, Dense())
        return OutputPlan(self.source, dict.fromkeys(reader.moe_layers, layout), self.options.shard_size)

    def sources(self) -> Mapping[str, str]:
        return {**super().sources(), "base": self.options.base}

    def plan(self) -> Plan:
        reader = self.source.experts
        if reader.layouts:
            raise UsageError(f"{self.source.checkpoint.path} is already decomposed.")
        if self.options.base != "mean":
            self._check_base(Path(self.options.base))
        return Plan(
            stage=self.name,
            input_bytes=self.source.checkpoint.weight_bytes,
            output_bytes=self._output_plan().nbytes,
            scratch_bytes=0,
            memory_bytes=CalibrationCost(0, 1, reader.dtype.itemsize).memory_bytes(
                reader, gradients=False, factors=False
            ),
            details={"moe_layers": len(reader.moe_layers), "experts": reader.shape.experts},
        )

    def _check_base(self, directory: Path) -> None:
        reader = self.source.experts
        if not directory.is_dir():
            raise InvalidInputError(
                f"--base {directory}: no such directory. Make one with fisher-merge, or use `mean`."
            )
        missing = [layer for layer in reader.moe_layers if not base_path(directory, layer).exists()]
        if missing:
            raise InvalidInputError(f"{directory} is not a complete base: no {base_path(directory, missing[0]).name}.")
        if read_manifest(directory).source_fingerprint != self.source.checkpoint.fingerprint():
            raise InvalidInputError(f"{directory} is the base of another model than {self.source.checkpoint.path}.")
        for layer in reader.moe_layers:
            path = base_path(directory, layer)
            try:
                matrices = LayerBase.load(path).matrices
            except (OSError, KeyError, SafetensorError) as error:
                raise InvalidInputError(f"{path} is damaged ({error}). Run fisher-merge again.") from error
            for role, matrix in matrices.items():
                if tuple(matrix.shape) != reader.shape.matrix(role) or matrix.dtype != reader.dtype:
                    raise InvalidInputError(
                        f"The {role} base of layer {layer} in {directory} does not fit the experts."
                    )

    def run(self, job: Job) -> dict[str, Any]:
        reader = self.source.experts
        directory = None if self.options.base == "mean" else Path(self.options.base)

        def load(layer: int) -> LayerBase:
            return unweighted_base(reader, layer) if directory is None else LayerBase.load(base_path(directory, layer))

        def tensors(layer: int, layout: LayerLayout) -> Iterator[tuple[str, Tensor]]:
            yield from base_tensors(reader, layer, layout, load(layer))
            prefix = reader.architecture.experts_prefix(layer)
            for expert, role, _ in layout.deltas():
                yield prefix + delta_name(expert, role, "matrix"), reader.dense(layer, expert, role)

        plan = self._output_plan()
        measured = {}
        if directory is not None:
            bases = {layer: LayerBase.load(base_path(directory, layer)) for layer in reader.moe_layers}
            measured = {layer: base.statistics for layer, base in bases.items() if base.statistics is not None}
        write_model(
            job, plan, tensors, entry=entry_for(plan.layouts, self.source, method=self.name), statistics=measured
        )
        return {}
