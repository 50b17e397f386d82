"""Stage that stores experts as a base and dense deltas, losing nothing: the second of D²-MoE's (§3.1, Eq. 3)."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from moetool.bases.layer_base import base_tensors
from moetool.compress.delta_forms import base_representations
from moetool.compress.given_base import GivenBaseOptions, OnGivenBase
from moetool.costs.building_blocks import moe_size
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.phases import decomposing_phases
from moetool.format.layout import LayerLayout, delta_name
from moetool.job.job import Job
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.result import Details
from moetool.job.shards import OutputPlan
from moetool.job.stage import Effect
from moetool.job.writing import entry_for, write_model
from moetool.representations.dense import Dense


class DecomposeOptions(GivenBaseOptions):
    """Options of decomposing: the base to which experts become deltas."""

    group_size: int = Field(
        128,
        ge=1,
        description="Inputs that share a scale in a quantized base; lowered to a divisor of a row where needed.",
    )


class Decompose(OnGivenBase[DecomposeOptions]):
    """Adds a base to every MoE layer.

    A delta is kept as the expert's own weight beside the base. That is the same information in the same bytes, and
    it is exact: the difference of two bf16 numbers usually is not a bf16 number.
    """

    name: ClassVar[str] = "decompose"
    summary: ClassVar[str] = "split experts into a shared base and deltas, without loss"
    options_type: ClassVar[type[RunOptions]] = DecomposeOptions
    is_parallel: ClassVar[bool] = True
    effect: ClassVar[Effect] = "preserves"
    next_command: ClassVar[str | None] = "quantize-delta {output} {new}-4bit --bits 4"

    def _output_plan(self) -> OutputPlan:
        reader, options = self.source.experts, self.options
        layout = LayerLayout.uniform(
            reader.shape,
            Dense(),
            base=base_representations(reader.shape, options.base_bits, self._base_group),
            extended=options.shared_expert,
        )
        return OutputPlan(self.source, dict.fromkeys(reader.moe_layers, layout), options.shard_size)

    @property
    def _base_group(self) -> int:
        return self.options.group_size

    def plan(self) -> Plan:
        reader, output = self.source.experts, self._output_plan()
        metrics = self._base().metrics()
        return Plan(
            stage=self.name,
            input_bytes=self.source.checkpoint.weight_bytes,
            output_bytes=output.nbytes,
            scratch_bytes=sum(path.stat().st_size for path in metrics),
            memory_bytes=CalibrationCost(0, 1, reader.dtype.itemsize).layer_memory(reader).nbytes(),
            phases=decomposing_phases(moe_size(reader), output.layouts, output.nbytes),
            details={"moe_layers": len(reader.moe_layers), "experts": reader.shape.experts},
        )

    def run(self, job: Job) -> Details:
        reader = self.source.experts
        given = self._opened(job)
        load_base = self._loading(given)

        def tensors(layer: int, layout: LayerLayout) -> Iterator[tuple[str, Tensor]]:
            weights = reader.weights(layer)
            yield from base_tensors(reader, layer, layout, load_base(layer, weights))
            prefix = reader.architecture.experts_prefix(layer)
            for expert, role, form in layout.deltas():
                for name, tensor in form.encode(weights(expert, role), reader.dtype).items():
                    yield prefix + delta_name(expert, role, name), tensor

        plan = self._output_plan()
        write_model(
            job,
            plan,
            tensors,
            entry=entry_for(plan.layouts, self.source, method=self.name),
            statistics=given.statistics(),
            metrics=given.metrics(),
        )
        return Details()
