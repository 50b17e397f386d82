"""Expert merging by hierarchical clustering of the experts' mean outputs (HC-SMoE, arXiv:2410.08589)."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from moetool.calibration.held_experts import HeldExperts
from moetool.costs.building_blocks import ModelSize
from moetool.costs.calibration_cost import CalibrationCost
from moetool.job.calibrated import CalibratedJob
from moetool.job.options import RunOptions
from moetool.numerics.work import Work
from moetool.reduce.choosing import Merged, clustered
from moetool.reduce.costs import every_expert
from moetool.reduce.options import ReduceOptions
from moetool.reduce.scores import OUTPUTS, TOKENS, AllOutputs, Scores
from moetool.reduce.stage import Reduction


class HcSmoe(Reduction[ReduceOptions]):
    """Clusters experts by their mean outputs over all tokens, with average linkage, and merges each cluster, weighted
    by how many tokens chose its members.

    Published, the router keeps all its rows, several of which lead to one expert; no ordinary checkpoint can say that.
    Here a cluster has the row of its most used member.
    """

    name: ClassVar[str] = "hc-smoe"
    summary: ClassVar[str] = "merge experts whose mean outputs are near"
    options_type: ClassVar[type[RunOptions]] = ReduceOptions
    holds_all: ClassVar[bool] = True
    merges: ClassVar[bool] = True

    def _scores(self, calibrated: CalibratedJob, index: int, layer: nn.Module) -> Scores:
        return AllOutputs(HeldExperts.of_layer(calibrated.experts(layer)), self.source.experts.shape.hidden)

    def _measured(self, cost: CalibrationCost, size: ModelSize) -> Work:
        return every_expert(cost, size, self.source.experts.shape)

    def _choose(self, measured: Mapping[str, Tensor]) -> list[Merged]:
        return clustered(measured[OUTPUTS], measured[TOKENS], self.fewer)  # sums: as near to each other as means
