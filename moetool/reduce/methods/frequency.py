"""Expert pruning by routing frequency: the experts that the fewest calibration tokens are routed to are dropped."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from moetool.job.calibrated import CalibratedJob
from moetool.job.options import RunOptions
from moetool.reduce.choosing import Merged, highest, pruned
from moetool.reduce.options import ReduceOptions
from moetool.reduce.scores import TOKENS, Scores
from moetool.reduce.stage import Reduction


class Frequency(Reduction[ReduceOptions]):
    """Expert pruning that keeps, in each layer, the experts that most calibration tokens are routed to."""

    name: ClassVar[str] = "frequency"
    summary: ClassVar[str] = "drop the experts that fewest tokens choose"
    options_type: ClassVar[type[RunOptions]] = ReduceOptions

    def _scores(self, calibrated: CalibratedJob, index: int, layer: nn.Module) -> Scores:
        return Scores(self.source.experts.shape.experts)

    def _choose(self, measured: Mapping[str, Tensor]) -> list[Merged]:
        return pruned(highest(measured[TOKENS], self.fewer))
