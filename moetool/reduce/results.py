"""Result records of the methods that leave a layer fewer experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetool.job.result import Details, Printed


@dataclass(frozen=True)
class ReducedLayer(Printed):
    """A layer with fewer experts.

    Attributes:
        tokens: calibration tokens of each expert that there was.
        made_of: of each expert that is left, those of the original that it is or was merged of.
    """

    tokens: Sequence[int]
    made_of: Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class ReducedResult(Details):
    """Result of a method that leaves every layer fewer experts.

    Attributes:
        ratio: as it was asked for, unless a number of experts was.
        experts_left: that every MoE layer has kept.
        notes: where the result is not what was asked for.
        layers: what became of each.
    """

    ratio: float | None
    experts_left: int
    notes: Sequence[str] = ()
    layers: Mapping[int, ReducedLayer]
