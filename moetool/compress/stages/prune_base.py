"""Stage that prunes intermediate channels of the base: the last of D²-MoE's (§3.4)."""

from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from moetool.bases.choices import Pruning
from moetool.bases.layer_base import base_tensors, stored_base
from moetool.bases.pruning import PruningPlan, plan_pruning
from moetool.calibration.collectors import LayerStatistics, UsageCollector
from moetool.checkpoint.sizes import Part
from moetool.compress.results import PrunedResult
from moetool.costs.building_blocks import moe_size
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import LayerMemory
from moetool.costs.phases import pruning_phases
from moetool.errors import InvalidInputError, UsageError
from moetool.format.layout import BASE_CHANNELS, LayerLayout
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job, refuse_shared_expert
from moetool.job.options import KeepOptions, RunOptions, TextOptions
from moetool.job.plan import Plan, calibration_cost, experts_at_once
from moetool.job.records import metrics_of, read_statistics
from moetool.job.result import CalibrationFacts, Json
from moetool.job.shards import OutputPlan
from moetool.job.stage import Effect, Stage
from moetool.job.writing import entry_for, write_model
from moetool.runtime.modules.batch_dependence import BATCH_DEPENDENT


class PruneBaseOptions(RunOptions, KeepOptions, TextOptions):
    """Options of `moetool prune-base`: how many channels of the base are pruned, and whether per batch."""

    ratio: Part = Field(0.1, gt=0, lt=1, description="Share of the base's intermediate channels to prune.")
    pruning: Pruning = Field(
        "static",
        description="static: remove channels from the file. semi-dynamic: remove half of them, and skip as many per "
        "batch (the output then depends on the batch).",
    )


class PruneBase(Stage[PruneBaseOptions]):
    """Removes the weakest channels from stored bases, and if asked sets how many more each batch skips.

    Uses the channel energies that an earlier stage measured and left in the checkpoint; without them, calibration text
    is needed.
    """

    name: ClassVar[str] = "prune-base"
    summary: ClassVar[str] = "prune intermediate channels of the shared base"
    options_type: ClassVar[type[RunOptions]] = PruneBaseOptions
    is_parallel: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    effect: ClassVar[Effect] = "rebases"

    def _pruning(self) -> PruningPlan:
        return plan_pruning(self.source.experts.shape.intermediate, self.options.ratio, self.options.pruning)

    def _output_plan(self) -> OutputPlan:
        reader, pruning = self.source.experts, self._pruning()
        refuse_shared_expert(self.source, self.name)
        layouts = {}
        for layer in reader.moe_layers:
            old = reader.layout(layer)
            if old.is_native:
                continue
            if old.is_pruned or old.dynamic_channels:
                raise InvalidInputError(
                    f"The base of layer {layer} is already pruned. For another --ratio start from what came before."
                )
            if old.is_baseless:
                raise InvalidInputError(f"The experts of layer {layer} are stored without a base: none can be pruned.")
            if any(old.compact_bases()):
                raise InvalidInputError(
                    f"The base of layer {layer} is stored as {old.base['down'].spec}: prune it before it is compressed."
                )
            dynamic = pruning.dynamic if old.weights["down"] is not None else 0
            layouts[layer] = LayerLayout(reader.shape, old.weights, reader.shape.intermediate - pruning.static, dynamic)
        if not pruning.static + pruning.dynamic:
            raise UsageError(
                f"--ratio {self.options.ratio:g} of {reader.shape.intermediate} channels is not one channel."
            )
        if not layouts:
            raise InvalidInputError(f"{self.source.checkpoint.source} has no shared base: run decompose on it first.")
        return OutputPlan(self.source, layouts, self.options.shard_size)

    @property
    def needs_text(self) -> bool:
        return not read_statistics(self.source)

    def plan(self) -> Plan:
        reader = self.source.experts
        output = self._output_plan()
        measured = bool(read_statistics(self.source))
        cost, memory, at_once = self._cost, self._memory, self._experts_at_once
        pruning = self._pruning()
        scratch = cost.forward_scratch(reader, reader.shape.experts if measured else at_once, sums=True)
        scratch += sum(path.stat().st_size for path in metrics_of(self.source).values())
        details: dict[str, Json] = {"static_channels": pruning.static, "dynamic_channels": pruning.dynamic}
        if not measured:
            details["experts_at_once"] = at_once
        return Plan(
            stage=self.name,
            input_bytes=self.source.checkpoint.weight_bytes,
            output_bytes=output.nbytes,
            scratch_bytes=scratch,
            memory_bytes=memory.nbytes(at_once),
            phases=pruning_phases(None if measured else cost, moe_size(reader, at_once), output.nbytes),
            details=details,
        )

    @cached_property
    def _cost(self) -> CalibrationCost:
        return calibration_cost(self.source, self.options, None if read_statistics(self.source) else self.options)

    @cached_property
    def _memory(self) -> LayerMemory:
        return self._cost.layer_memory(self.source.experts, gradients=False)

    @cached_property
    def _experts_at_once(self) -> int:
        return experts_at_once(self._memory, self.options)

    def run(self, job: Job) -> PrunedResult:
        reader, pruning = self.source.experts, self._pruning()
        statistics, facts = read_statistics(self.source), None
        if not statistics:
            statistics, facts = self._measure(job)

        def tensors(layer: int, layout: LayerLayout) -> Iterator[tuple[str, Tensor]]:
            base = stored_base(reader, layer, statistics[layer])
            if "down" not in base.matrices:
                # Channels are scored by what the down base makes of them; where down has none, by the experts' mean.
                down = [reader.dense(layer, expert, "down").float() for expert in range(reader.shape.experts)]
                base.matrices["down"] = torch.stack(down).mean(0)
            yield from base_tensors(reader, layer, layout, base.pruned(pruning))
            prefix = reader.architecture.experts_prefix(layer)
            for name, _ in layout.own_tensors():
                if name != BASE_CHANNELS:
                    yield prefix + name, self.source.checkpoint.read(prefix + name)

        plan = self._output_plan()
        depends = any(layout.dynamic_channels for layout in plan.layouts.values())
        if depends:
            job.progress.log(BATCH_DEPENDENT)
        write_model(
            job,
            plan,
            tensors,
            entry=entry_for(plan.layouts, self.source),
            statistics=statistics,
            metrics=metrics_of(self.source).values(),
            calibration=facts,
        )
        return PrunedResult(
            calibration=facts,
            static_channels=pruning.static,
            dynamic_channels=pruning.dynamic,
            depends_on_batch=depends,
        )

    def _measure(self, job: Job) -> tuple[dict[int, LayerStatistics], CalibrationFacts]:
        shape = self.source.experts.shape
        calibrated = CalibratedJob(job, self.options, experts_at_once=self._experts_at_once)

        def measure(index: int, layer: nn.Module) -> dict[str, Tensor]:
            usage = UsageCollector(shape)
            calibrated.sweep.forward(index, layer, [usage])
            return LayerStatistics.from_usage(usage, shape).tensors()

        found = calibrated.measured("usage", measure)
        return {layer: LayerStatistics.from_tensors(own) for layer, own in found.items()}, calibrated.facts
