"""Expert pruning by router weight times norm of the output: those that add least are dropped (REAP,
arXiv:2510.13999)."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from moetool.costs.building_blocks import ModelSize
from moetool.costs.calibration_cost import CalibrationCost
from moetool.job.calibrated import CalibratedJob
from moetool.job.options import RunOptions
from moetool.numerics.work import Work
from moetool.reduce.choosing import Merged, highest, pruned
from moetool.reduce.costs import tokens_in_layers
from moetool.reduce.options import ReduceOptions
from moetool.reduce.scores import SALIENCY, TOKENS, Saliency, Scores
from moetool.reduce.stage import Reduction


class Reap(Reduction[ReduceOptions]):
    """Keeps the experts with the highest mean of g_j ‖f_j(x)‖₂ over the tokens x that were routed to them."""

    name: ClassVar[str] = "reap"
    summary: ClassVar[str] = "drop the experts that add least to the layer's output"
    options_type: ClassVar[type[RunOptions]] = ReduceOptions

    def _scores(self, calibrated: CalibratedJob, index: int, layer: nn.Module) -> Scores:
        return Saliency(self.source.experts.shape.experts)

    def _measured(self, cost: CalibrationCost, size: ModelSize) -> Work:
        return Work(moved=24 * tokens_in_layers(cost, size) * self.source.experts.shape.top_k * size.hidden)

    def _choose(self, measured: Mapping[str, Tensor]) -> list[Merged]:
        return pruned(highest(measured[SALIENCY] / measured[TOKENS].clamp(min=1), self.fewer))
