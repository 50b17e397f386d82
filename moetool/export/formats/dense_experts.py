"""Export to the model's original layout: any engine that ran the source runs the result."""

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from moetool.architectures import Role
from moetool.costs.building_blocks import decoding, moe_size
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.phases import rewriting_phases
from moetool.errors import UsageError
from moetool.format.layout import LayerLayout, native_layout
from moetool.job.job import DecodedSource, Input, Job
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.result import Details
from moetool.job.shards import OutputPlan
from moetool.job.stage import Effect, Stage
from moetool.job.writing import write_model


class Export(Stage[RunOptions]):
    """Synthesizes every expert from base and delta. What the compression lost stays lost; the file grows back."""

    name: ClassVar[str] = "dense-experts"
    summary: ClassVar[str] = "write the experts back in the model's original layout"
    options_type: ClassVar[type[RunOptions]] = RunOptions
    source_type: ClassVar[type[Input]] = DecodedSource
    method_of: ClassVar[str | None] = "export"
    is_parallel: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    effect: ClassVar[Effect] = "preserves"

    def _output_plan(self) -> OutputPlan:
        reader = self.source.experts
        checkpoint = self.source.checkpoint
        if not reader.layouts and not checkpoint.forms and checkpoint.stored_as is None:
            raise UsageError(
                f"{checkpoint.source} is not a moetool checkpoint: it is in its original layout. For other "
                "engines give --format gguf or --format compressed-tensors."
            )
        layouts = {layer: native_layout(reader.shape) for layer in reader.layouts}
        return OutputPlan(self.source, layouts, self.options.shard_size)

    def plan(self) -> Plan:
        reader, output = self.source.experts, self._output_plan().nbytes
        dynamic = sum(1 for layout in reader.layouts.values() if layout.dynamic_channels)
        return Plan(
            stage=self.name,
            input_bytes=self.source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=0,
            memory_bytes=CalibrationCost(0, 1, 4).layer_memory(reader).nbytes(),
            phases=rewriting_phases(moe_size(reader), output, decoding(moe_size(reader))),
            details={"layers_without_dynamic_pruning": dynamic} if dynamic else {},
        )

    def run(self, job: Job) -> Details:
        reader = self.source.experts
        if any(layout.dynamic_channels for layout in reader.layouts.values()):
            job.progress.log(
                "Dynamic pruning of the base depends on the batch and has no dense form: the export runs without it."
            )

        def tensors(layer: int, layout: LayerLayout) -> Iterator[tuple[str, Tensor]]:
            def dense(role: Role, expert: int) -> Tensor:
                return reader.dense(layer, expert, role).to(reader.dtype)

            for roles in reader.shape.groups:
                yield from reader.native_tensors(layer, roles, reader.shape.experts, dense)
            if reader.layout(layer).is_extended:
                yield from reader.shared_expert_tensors(layer, lambda role: dense(role, reader.shape.experts))

        write_model(job, self._output_plan(), tensors, entry=None, statistics={})
        return Details()
