"""D²-MoE in one streamed pass: base, differences, factors (arXiv:2502.17298)."""

from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from moetool.errors import UsageError
from moetool.methods.choices import Merge, Pruning
from moetool.methods.pruning import plan_pruning
from moetool.pipeline.bases import base_path, measured_base
from moetool.pipeline.calibrated import CalibratedJob
from moetool.pipeline.factored import Factored, FactorOptions, factor_plan, finish
from moetool.pipeline.factors import measured_grams, write_factors
from moetool.pipeline.job import Job
from moetool.pipeline.options import RunOptions
from moetool.pipeline.plan import Plan
from moetool.pipeline.stage import Stage


class D2MoEOptions(FactorOptions):
    """Everything that decides a D²-MoE compression."""

    merge: Merge = Field("fisher", description="How the shared base is made of the experts.")
    prune_base: float = Field(
        0.0, ge=0, lt=1, description="Share of the base's intermediate channels to prune (the paper uses 0.1 and 0.6)."
    )
    pruning: Pruning = Field("semi-dynamic", description="Half of it statically and half per batch, or all statically.")


class D2MoE(Stage[D2MoEOptions]):
    """Fisher-weighted base, truncation-aware low-rank differences, semi-dynamically pruned base."""

    name: ClassVar[str] = "d2moe"
    summary: ClassVar[str] = "one shared base per layer plus low-rank differences"
    options_type: ClassVar[type[RunOptions]] = D2MoEOptions
    is_method: ClassVar[bool] = True

    def plan(self) -> Plan:
        source, options = self.source, self.options
        reader = source.experts
        if reader.layouts:
            raise UsageError(
                f"{source.checkpoint.path} is already a moetool checkpoint. compress starts from an ordinary one; "
                "svd-compress and prune-base go on from what is there."
            )
        pruning = plan_pruning(reader.shape.intermediate, options.prune_base, options.pruning)
        return factor_plan(self.name, source, options, reader.shape.intermediate - pruning.static, gradients=True)

    def run(self, job: Job) -> dict[str, Any]:
        options, reader = self.options, self.source.experts
        pruning = plan_pruning(reader.shape.intermediate, options.prune_base, options.pruning)
        calibrated = CalibratedJob(job, options)
        calibrated.forward()

        def visit(index: int, layer: nn.Module) -> None:
            base = measured_base(calibrated, index, layer, options.merge).pruned(pruning)
            grams = measured_grams(calibrated, index, layer, base, keep=False)
            base.save(base_path(job.work, index))
            write_factors(reader, job.work, index, base, options.svd, options.sensitivity, grams, job.device)

        calibrated.reverse(visit, passes=2)
        job.record["calibration"]["loss"] = calibrated.loss
        return finish(job, Factored(job, pruning.dynamic), options, self.name)
