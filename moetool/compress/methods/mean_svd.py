"""The experts' mean, and a truncated SVD of what each has beside it: D²-MoE without anything that it measures."""

from collections.abc import Mapping
from typing import ClassVar

from moetool.architectures import Role
from moetool.bases.layer_base import LayerBase, unweighted_base
from moetool.checkpoint.experts import Weights
from moetool.compress.methods.plain_svd import UnmeasuredSvd
from moetool.representations import Representation


class MeanSvd(UnmeasuredSvd):
    """Factors of deltas to the mean."""

    name: ClassVar[str] = "mean-svd"
    summary: ClassVar[str] = "the experts' mean plus truncated SVDs of deltas to it"

    @property
    def _bases(self) -> Mapping[Role, Representation] | None:
        return None

    def _base(self, weights: Weights) -> LayerBase:
        return unweighted_base(weights, self.source.experts.shape, self.source.experts.dtype, "mean")
