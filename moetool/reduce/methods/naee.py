"""Expert pruning that keeps the subset of experts whose output is nearest to that of all (NAEE, arXiv:2402.14800)."""

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from moetool.calibration.held_experts import HeldExperts
from moetool.costs.building_blocks import ModelSize
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import Measuring
from moetool.errors import UsageError
from moetool.job.calibrated import CalibratedJob
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.numerics.work import Work
from moetool.reduce.choosing import Merged, pruned
from moetool.reduce.costs import every_expert, tokens_in_layers
from moetool.reduce.options import ReduceOptions
from moetool.reduce.scores import Scores
from moetool.reduce.stage import Reduction
from moetool.reduce.subsets import LOSSES, NUMBERS_AT_ONCE, Subset, SubsetLosses, SubsetRouters, subset_count, subsets

_MOST = 20_000  # subsets that are tried unless more are asked for


class NaeeOptions(ReduceOptions):
    """Options of NAEE: those of all reductions, and how many subsets are tried."""

    subsets: int | None = Field(
        None, ge=1, description="Try so many random subsets of every layer's experts (by default all)."
    )


class Naee(Reduction[NaeeOptions]):
    """Keeps the experts with which the layer's output on the text is nearest to the original's in Frobenius norm."""

    name: ClassVar[str] = "naee"
    summary: ClassVar[str] = "keep the subset of experts with the nearest output"
    options_type: ClassVar[type[RunOptions]] = NaeeOptions
    holds_all: ClassVar[bool] = True
    asks_router: ClassVar[bool] = True

    def plan(self) -> Plan:
        count = subset_count(self.fewer)
        if count > _MOST and self.options.subsets is None:
            raise UsageError(
                f"There are {count:,} ways to keep {self.fewer.kept} of {self.fewer.experts} experts in a layer, and "
                f"naee tries them all up to {_MOST:,}. --subsets {_MOST // 10} tries as many at random; reap needs no "
                "subsets."
            )
        return super().plan()

    @cached_property
    def _subsets(self) -> list[Subset]:
        return subsets(self.fewer, self.options.subsets, self.options.seed)

    def _scores(self, calibrated: CalibratedJob, index: int, layer: nn.Module) -> Scores:
        routers = SubsetRouters(self.source, calibrated.model.dtype, calibrated.model.device)
        whole = routers.of(index, layer, tuple(range(self.fewer.experts)))
        held = HeldExperts.of_layer(calibrated.experts(layer))
        return SubsetLosses(held, whole, self._subsets, lambda subset: routers.of(index, layer, subset))

    def _measured(self, cost: CalibrationCost, size: ModelSize) -> Work:
        shape, tokens = self.source.experts.shape, tokens_in_layers(cost, size)
        tried = min(self.options.subsets or _MOST, subset_count(self.fewer))
        squares = tokens * shape.experts**2
        return (
            every_expert(cost, size, shape)
            + Work(products={"float64": squares * (shape.hidden + tried)})
            + Work(
                products={"float32": tokens * tried * self.fewer.kept * shape.hidden},
                moved=tokens * tried * 100 * shape.experts,
                calls=tried * 60 * tokens / 1024,
            )
        )

    def _measuring(self) -> Measuring:
        """Outputs of all experts for some tokens, and their products for a batch."""
        tokens = max(1024, self.options.sequence_length)
        return Measuring(common=16 * NUMBERS_AT_ONCE + 3 * 8 * tokens * self.fewer.experts**2)

    def _choose(self, measured: Mapping[str, Tensor]) -> list[Merged]:
        return pruned(self._subsets[int(measured[LOSSES].argmin())])
