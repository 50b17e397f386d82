"""Expert merging into the experts that most tokens choose (M-SMoE, the merging of MC-SMoE, arXiv:2310.01334)."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from moetool.costs.building_blocks import ModelSize
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import Measuring
from moetool.job.calibrated import CalibratedJob
from moetool.job.options import RunOptions
from moetool.numerics.work import Work
from moetool.reduce.choosing import Merged, around_dominant
from moetool.reduce.costs import tokens_in_layers
from moetool.reduce.options import ReduceOptions
from moetool.reduce.scores import LOGIT_GRAM, TOKENS, LogitGram, Scores
from moetool.reduce.stage import Reduction


class MSmoe(Reduction[ReduceOptions]):
    """Merges every expert into the dominant one with the most similar router logits, its neurons matched to that one's,
    weighted by how many tokens chose each.

    Published, layers keep different numbers of experts, and the router all its rows; here every layer as many, and the
    rows of the dominant ones.
    """

    name: ClassVar[str] = "m-smoe"
    summary: ClassVar[str] = "merge experts, neurons aligned, into those that most tokens choose"
    options_type: ClassVar[type[RunOptions]] = ReduceOptions
    merges: ClassVar[bool] = True
    aligns: ClassVar[bool] = True
    asks_router: ClassVar[bool] = True

    def _scores(self, calibrated: CalibratedJob, index: int, layer: nn.Module) -> Scores:
        name, experts = self.source.architecture.router_name(index), self.fewer.experts
        return LogitGram(self.source.checkpoint.read_rows(name, 0, experts).float().to(calibrated.model.device))

    def _measured(self, cost: CalibrationCost, size: ModelSize) -> Work:
        shape = self.source.experts.shape
        each = shape.experts * (shape.hidden + shape.experts)
        return Work(products={"float64": tokens_in_layers(cost, size) * each})

    def _measuring(self) -> Measuring:
        """The inner products of two experts' neurons in fp32, and twice in fp64 where they are assigned."""
        return Measuring(work=20 * self.source.experts.shape.intermediate**2)

    def _choose(self, measured: Mapping[str, Tensor]) -> list[Merged]:
        return around_dominant(measured[LOGIT_GRAM], measured[TOKENS], self.fewer)
