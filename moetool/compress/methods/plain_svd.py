"""Truncated SVD without calibration: of each expert's own matrices, or of its deltas to the experts' mean.

What every low-rank method is measured against: factors that are best in the plain norm, ‖W − U V‖_F, and the same share
of every matrix (the baselines of D²-MoE, arXiv:2502.17298, Table 1).
"""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from pydantic import Field

from moetool.architectures import Role
from moetool.bases.layer_base import LayerBase, no_base, unweighted_base
from moetool.checkpoint.experts import Weights
from moetool.compress.delta_forms import refuse_compressed
from moetool.compress.factors.options import FactorOptions
from moetool.compress.factors.writing import FactoredLayers, factor_memory, factor_plan, measure_layers
from moetool.compress.results import RankedResult
from moetool.format.layout import NO_BASE
from moetool.job.job import Job
from moetool.job.options import KeepOptions, RunOptions, SizeOptions
from moetool.job.plan import Plan
from moetool.job.stage import Stage
from moetool.representations import Representation


class PlainSvdOptions(RunOptions, SizeOptions, KeepOptions):
    """Options of `plain-svd` and `mean-svd`: a budget of bytes, or one rank."""

    alternatives: ClassVar[tuple[str, ...]] = ("ratio", "size", "rank")

    rank: int | None = Field(None, ge=0, description="Instead of --ratio: one rank for every matrix.")

    @property
    def factors(self) -> FactorOptions:
        """Options for making factors when nothing is measured, and no matrix counts more than another."""
        own = self.model_dump(exclude={"size"})  # which is a ratio by now
        options = FactorOptions(**own, svd="vanilla", allocation="uniform", sensitivity="none")
        return options.model_copy(update={"size": self.size})


class UnmeasuredSvd(Stage[PlainSvdOptions]):
    """A stage whose base needs no text, and which stores factors of deltas to it."""

    options_type: ClassVar[type[RunOptions]] = PlainSvdOptions
    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True

    @property
    @abstractmethod
    def _bases(self) -> Mapping[Role, Representation] | None:
        """Form in which bases are stored; `None` for dense ones."""

    @abstractmethod
    def _base(self, weights: Weights) -> LayerBase:
        """The base of a layer whose experts have these matrices."""

    @cached_property
    def _factors(self) -> FactorOptions:
        return self.options.factors

    def plan(self) -> Plan:
        source, shape = self.source, self.source.experts.shape
        refuse_compressed(source)
        memory = factor_memory(source, self._factors, None)
        return factor_plan(
            self.name,
            source,
            self._factors,
            shape.intermediate,
            memory,
            shape.experts,
            gradients=False,
            base=self._bases,
        )

    def run(self, job: Job) -> RankedResult:
        measure_layers(job, self._factors, lambda _, weights: self._base(weights))
        return FactoredLayers(job, 0, self._factors).finish(self.name, None)


class PlainSvd(UnmeasuredSvd):
    """Truncated SVD of each expert's own matrices, with neither a base nor calibration text."""

    name: ClassVar[str] = "plain-svd"
    summary: ClassVar[str] = "every expert's own truncated SVD, without a base"

    @property
    def _bases(self) -> Mapping[Role, Representation] | None:
        return NO_BASE

    def _base(self, weights: Weights) -> LayerBase:
        return no_base(self.source.experts.shape, self.source.experts.dtype)


class MeanSvd(UnmeasuredSvd):
    """Stores the experts' mean and factors of deltas to it: D²-MoE without anything that it measures."""

    name: ClassVar[str] = "mean-svd"
    summary: ClassVar[str] = "the experts' mean plus truncated SVDs of deltas to it"

    @property
    def _bases(self) -> Mapping[Role, Representation] | None:
        return None

    def _base(self, weights: Weights) -> LayerBase:
        return unweighted_base(weights, self.source.experts.shape, self.source.experts.dtype, "mean")
