"""D²-MoE in one streamed pass: base, deltas, factors (arXiv:2502.17298)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from pydantic import Field, model_validator
from torch import nn

from moetool.architectures import Role
from moetool.bases.choices import BaseCompression, Merge
from moetool.bases.layer_base import agreed, base_path, base_rank, factored_base, measured_base
from moetool.bases.pruning import plan_pruning
from moetool.checkpoint.counting import parameter_counts
from moetool.checkpoint.sizes import Part
from moetool.compress.delta_forms import refuse_compressed
from moetool.compress.factors.files import LayerFactors, SpectrumFile, measuring_owners
from moetool.compress.factors.options import FactorOptions
from moetool.compress.factors.writing import (
    FactoredLayers,
    factor_memory,
    factor_plan,
    factors_at_once,
)
from moetool.compress.paper_counting import PaperRank, paper_rank
from moetool.compress.results import RankedResult
from moetool.costs.layer_memory import LayerMemory
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job
from moetool.job.options import CalibrationOptions, IncludeOptions, RunOptions
from moetool.job.plan import Plan
from moetool.job.stage import AnyStage, Stage
from moetool.representations import Representation
from moetool.representations.low_rank import LowRank
from moetool.runtime.modules.batch_dependence import BATCH_DEPENDENT

# Options that only matter once bases and spectra are there.
_INSTEAD = "`--method auto`, the default, usually loses less in as many bytes."
_SPENDING = {"ratio", "rank", "paper_counting", "allocation", "trim", "rank_multiple", "factor_bits"}
_LATER = {*_SPENDING, "device", "memory", "disk", "shard_size"}


class D2MoEOptions(FactorOptions, IncludeOptions, CalibrationOptions):
    """Options of `d2moe`: base, pruning, budget of ranks, refinement."""

    merge: Merge = Field("fisher", description="How the shared base is made of the experts.")
    prune_base: Part = Field(
        0.0, ge=0, lt=1, description="Share of the base's intermediate channels to prune (the paper uses 0.1 and 0.6)."
    )
    pruning: BaseCompression = Field(
        "static",
        description="static: remove channels from the file. semi-dynamic: remove half of them, and skip as many per "
        "batch (the output then depends on the batch). svd: keep all channels, cut the same share by SVD.",
    )
    paper_counting: bool = Field(
        False,
        description="Count --ratio as the paper does: in parameters, with one rank for all, and with channels that are "
        "only skipped at run time as removed.",
    )

    refine: int = Field(
        0,
        ge=0,
        description="Fine-tune each layer's base and factors together for so many steps; kept only where the held-out "
        "error improves (0: off; 64 is usual).",
    )

    @model_validator(mode="after")
    def _apart(self) -> "D2MoEOptions":
        if self.refine and self.share != "none":
            raise ValueError(f"--refine {self.refine} and --share {self.share} exclude each other")
        if self.factor_bits == 8 and self.paper_counting:
            raise ValueError("--factor-bits 8 and --paper-counting exclude each other")
        return self

    @model_validator(mode="after")
    def _ratio_to_count(self) -> "D2MoEOptions":
        if self.paper_counting and self.ratio is None:
            raise ValueError("--paper-counting is about --ratio: give one")
        return self


class D2MoE(Stage[D2MoEOptions]):
    """Stores a Fisher-weighted base, pruned if asked for, and truncation-aware low-rank deltas to it."""

    name: ClassVar[str] = "d2moe"
    summary: ClassVar[str] = "one shared base per layer plus low-rank deltas"
    options_type: ClassVar[type[RunOptions]] = D2MoEOptions
    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True

    @property
    def needs_text(self) -> bool:
        return True

    def plan(self) -> Plan:
        source, options = self.source, self.options
        reader = source.experts
        refuse_compressed(source)
        pruning = plan_pruning(reader.shape.intermediate, options.prune_base, options.pruning)
        bases: dict[Role, Representation] | None = None
        if self._factored_base:
            ranks = {role: base_rank(reader.shape.matrix(role), options.prune_base) for role in reader.shape.roles}
            bases = {role: LowRank(rank) for role, rank in ranks.items()}
        channels = reader.shape.intermediate - pruning.static
        plan = factor_plan(
            self.name,
            source,
            self._counted,
            channels,
            self._memory,
            self._experts_at_once,
            gradients=True,
            base=bases,
            refine=options.refine,
        )
        if not options.paper_counting:
            return plan
        found = self._paper_rank
        return replace(plan, details={**plan.details, "rank": found.rank, "kept_of_differences": round(found.kept, 6)})

    @cached_property
    def _memory(self) -> LayerMemory:
        return factor_memory(self.source, self.options, self.options.merge, refine=self.options.refine)

    @cached_property
    def _experts_at_once(self) -> int:
        return factors_at_once(self._memory, self.options)

    @property
    def _factored_base(self) -> bool:
        return self.options.pruning == "svd" and self.options.prune_base > 0

    @property
    def _paper_rank(self) -> PaperRank:
        reader, options = self.source.experts, self.options
        assert options.ratio is not None
        total = parameter_counts(self.source.experts)["total"]
        return paper_rank(options.ratio, options.prune_base, reader.shape, len(reader.moe_layers), total)

    @property
    def _counted(self) -> D2MoEOptions:
        """The options, with a ratio as the paper counts it replaced by the rank that it stands for."""
        if not self.options.paper_counting:
            return self.options
        return self.options.model_copy(update={"ratio": None, "rank": self._paper_rank.rank})

    def shared_recipe(self) -> Mapping[str, object]:
        return {"stage": self.name, **self.options.model_dump(mode="json", exclude=_LATER)}

    def measure(self, job: Job, beside: Sequence[AnyStage]) -> None:
        self._measured(job)

    def run(self, job: Job) -> RankedResult:
        options = self._counted
        pruning = plan_pruning(self.source.experts.shape.intermediate, options.prune_base, options.pruning)
        if pruning.dynamic:
            job.progress.log(BATCH_DEPENDENT)
        calibrated = self._measured(job)
        found = FactoredLayers(job, pruning.dynamic, options).finish(self.name, calibrated, options.refine)
        return replace(found, notes=[*found.notes, _INSTEAD])

    def _measured(self, job: Job) -> CalibratedJob:
        """Write base and spectra of every layer to the work directory."""
        options, reader = self._counted, self.source.experts
        pruning = plan_pruning(reader.shape.intermediate, options.prune_base, options.pruning)
        calibrated = CalibratedJob(job, options, gradients=True, experts_at_once=self._experts_at_once)

        def visit(index: int, layer: nn.Module) -> None:
            has_metric = options.links_outputs or options.refine > 0
            base = measured_base(calibrated, index, layer, options.merge, metric=has_metric).pruned(pruning)
            if self._factored_base:
                base = factored_base(calibrated, index, layer, base, options.prune_base)
            base = agreed(job.ranks, base_path(job.work, index), base)
            owned = measuring_owners(reader.shape, options.share, job.ranks)
            file, sweep = SpectrumFile(job.work, index, reader.shape, options.share), calibrated.gradient_sweep
            LayerFactors.on_text(calibrated, sweep, index, layer, base, owned, options, keep=False).measure(file)

        calibrated.reverse(visit, passes=2)
        return calibrated
