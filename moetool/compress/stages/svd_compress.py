"""Stage that replaces deltas by low-rank factors: the third of D²-MoE's (§3.3)."""

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from torch import nn

from moetool.bases.layer_base import agreed, base_path, stored_base
from moetool.calibration.collectors import LayerStatistics
from moetool.calibration.output_gradients import metric_path
from moetool.checkpoint.files import place
from moetool.compress.factors.files import LayerFactors, SpectrumFile, measuring_owners
from moetool.compress.factors.options import FactorOptions
from moetool.compress.factors.writing import (
    FactoredLayers,
    factor_memory,
    factor_plan,
    factors_at_once,
    measure_layers,
)
from moetool.compress.results import RankedResult
from moetool.costs.layer_memory import LayerMemory
from moetool.errors import InvalidInputError, UsageError
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job, refuse_shared_expert
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.records import metrics_of, read_statistics
from moetool.job.stage import Stage


class SvdCompress(Stage[FactorOptions]):
    """Factorises the deltas of a decomposed checkpoint against the bases it holds."""

    name: ClassVar[str] = "svd-compress"
    summary: ClassVar[str] = "make the deltas of a decomposed checkpoint low-rank"
    options_type: ClassVar[type[RunOptions]] = FactorOptions
    is_parallel: ClassVar[bool] = True
    continues: ClassVar[bool] = True

    @property
    def needs_text(self) -> bool:
        return self.options.svd != "vanilla"

    def plan(self) -> Plan:
        reader, options = self.source.experts, self.options
        layouts = [reader.layout(layer) for layer in reader.moe_layers]
        if any(weights is None for layout in layouts for weights in layout.weights.values()):
            path, is_native = self.source.checkpoint.path, all(layout.is_native for layout in layouts)
            raise InvalidInputError(
                f"{path} has no shared base: run decompose on it first."
                if is_native
                else f"{path} is compressed already, with some experts left without a base: start from its source."
            )
        refuse_shared_expert(self.source, self.name)
        if options.trim and not read_statistics(self.source):
            raise UsageError("--trim needs to know how often experts are used: decompose with a base of fisher-merge.")
        channels = max(layout.base_channels for layout in layouts)
        memory, at_once = self._memory, self._experts_at_once
        return factor_plan(
            self.name, self.source, options, channels, memory, at_once, gradients=False, base=layouts[0].base
        )

    @cached_property
    def _memory(self) -> LayerMemory:
        return factor_memory(self.source, self.options, None)

    @cached_property
    def _experts_at_once(self) -> int:
        return factors_at_once(self._memory, self.options)

    def run(self, job: Job) -> RankedResult:
        reader, options = self.source.experts, self.options
        statistics = read_statistics(self.source)
        if options.sensitivity != "none" and not any(measured.has_fisher for measured in statistics.values()):
            job.progress.log(
                "The input carries no Fisher statistics (decompose --base BASE from fisher-merge would): "
                "all errors count the same."
            )

        calibrated = None
        if options.calibration is None:
            measure_layers(job, options, lambda layer, _: stored_base(reader, layer, statistics.get(layer)))
        else:
            calibrated = self._measured(job, statistics)
        dynamic = {layer: reader.layout(layer).dynamic_channels for layer in reader.moe_layers}
        return FactoredLayers(job, dynamic, options).finish(self.name, calibrated)

    def _measured(self, job: Job, statistics: Mapping[int, LayerStatistics]) -> CalibratedJob:
        """Write base and spectra of every layer to the work directory, on the text."""
        reader, options = self.source.experts, self.options
        calibrated = CalibratedJob(job, options, experts_at_once=self._experts_at_once)
        if job.ranks.is_first:
            for layer, metric in metrics_of(self.source).items():
                place(metric, metric_path(job.work, layer))
        job.ranks.barrier()

        def visit(index: int, layer: nn.Module) -> None:
            stored = stored_base(reader, index, statistics.get(index))
            base = agreed(job.ranks, base_path(job.work, index), stored)
            owned = measuring_owners(reader.shape, options.share, job.ranks)
            found = LayerFactors.on_text(calibrated, calibrated.sweep, index, layer, base, owned, options, keep=True)
            found.measure(SpectrumFile(job.work, index, reader.shape, options.share))

        calibrated.forward_visiting(visit)
        job.meet()
        return calibrated
