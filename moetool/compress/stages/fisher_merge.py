"""Stage that merges the experts of each layer into one shared base: the first of D²-MoE's (§3.2)."""

from functools import cached_property
from typing import ClassVar

from pydantic import Field
from torch import nn

from moetool.bases.choices import UNMEASURED_MERGES, Merge
from moetool.bases.layer_base import agreed, base_path, measured_base, unweighted_base
from moetool.calibration.output_gradients import metric_path
from moetool.checkpoint.files import place
from moetool.compress.results import LayersResult, MergedLayer
from moetool.costs.building_blocks import moe_size
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import LayerMemory, Measuring
from moetool.costs.phases import base_phases
from moetool.errors import UsageError
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job
from moetool.job.options import CalibrationOptions, RunOptions
from moetool.job.plan import Plan, calibration_cost, experts_at_once
from moetool.job.result import Json
from moetool.job.stage import Stage
from moetool.job.writing import record_origin


class FisherMergeOptions(RunOptions, CalibrationOptions):
    """Options of `moetool fisher-merge`: calibration, and the rule by which experts are merged into a base."""

    merge: Merge = Field("fisher", description="How the shared base is made of the experts.")


class FisherMerge(Stage[FisherMergeOptions]):
    """Writes a base: not a model, but what `decompose --base` needs, with what was measured to make it."""

    name: ClassVar[str] = "fisher-merge"
    summary: ClassVar[str] = "merge the experts of each layer into one shared base"
    options_type: ClassVar[type[RunOptions]] = FisherMergeOptions
    writes_model: ClassVar[bool] = False
    is_parallel: ClassVar[bool] = True
    next_command: ClassVar[str | None] = "decompose {input} {new}-decomposed --base {output}"

    @property
    def needs_text(self) -> bool:
        return self.options.merge not in UNMEASURED_MERGES

    def plan(self) -> Plan:
        reader, options = self.source.experts, self.options
        if reader.layouts:
            raise UsageError(
                f"{self.source.checkpoint.source} is compressed already: {self.name} and decompose start from the "
                "ordinary checkpoint that it was made from."
            )
        cost, at_once = self._cost, self._experts_at_once
        layers = self.source.architecture.layers
        base = reader.shape.expert_parameters * reader.dtype.itemsize
        measured = options.calibration is not None
        shape = reader.shape
        channels = 8 * shape.intermediate + 1024  # which are kept, and the header
        rows = sum(shape.matrix(role)[0] for role in shape.roles)
        statistics = shape.experts * (4 * rows + 8) + 8 * shape.intermediate + 4 * shape.hidden**2 if measured else 0
        output = len(reader.moe_layers) * (base + channels + statistics)
        scratch = cost.backward_scratch(reader, at_once) if measured else 0
        details: dict[str, Json] = {"layers": layers, "moe_layers": len(reader.moe_layers), "experts": shape.experts}
        return Plan(
            stage=self.name,
            input_bytes=self.source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=scratch,
            memory_bytes=self._memory.nbytes(at_once),
            phases=base_phases(cost if measured else None, moe_size(reader, at_once), output),
            details=details | ({"experts_at_once": at_once} if measured else {}),
        )

    @cached_property
    def _cost(self) -> CalibrationCost:
        return calibration_cost(self.source, self.options, self.options, gradients=True)

    @cached_property
    def _memory(self) -> LayerMemory:
        reader, options = self.source.experts, self.options
        if options.calibration is None:
            return self._cost.layer_memory(reader, gradients=False)
        measuring = Measuring.fisher(reader.shape, regression=options.merge == "regmean")
        return self._cost.layer_memory(reader, measuring, gradients=True)

    @cached_property
    def _experts_at_once(self) -> int:
        measured = self.options.calibration is not None
        return experts_at_once(self._memory, self.options) if measured else self._memory.experts

    def run(self, job: Job) -> LayersResult:
        reader, options = self.source.experts, self.options
        facts = None
        if options.calibration is None:
            for layer in job.share("merge", dict.fromkeys(reader.moe_layers, 1.0)):
                base = unweighted_base(reader.weights(layer), reader.shape, reader.dtype, options.merge)
                base.save(base_path(job.work, layer))
                job.finish(f"merge/{layer}", made=[base_path(job.work, layer)])
        else:
            calibrated = CalibratedJob(job, options, gradients=True, experts_at_once=self._experts_at_once)

            def visit(index: int, layer: nn.Module) -> None:
                base = measured_base(calibrated, index, layer, options.merge, metric=True)
                agreed(job.ranks, base_path(job.work, index), base)

            calibrated.reverse(visit, passes=1)
            facts = calibrated.facts
        told = LayersResult(calibration=facts, layers=dict.fromkeys(reader.moe_layers, MergedLayer()))
        if not job.ranks.is_first:
            return told
        paths = [base_path(job.work, layer) for layer in reader.moe_layers]
        if facts is not None:
            paths += [metric_path(job.work, layer) for layer in reader.moe_layers]
        placed = [place(path, job.output / path.name) for path in paths]
        record_origin(job, files=placed, calibration=facts)
        return told
