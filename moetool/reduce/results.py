"""Result records of the methods that leave a layer fewer experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetool.job.result import Details, Printed


@dataclass(frozen=True)
class ReducedLayer(Printed):
    """A layer with fewer experts.

    Attributes:
        made_of: of each expert that is left, those of the original that it is or was merged of.
        tokens: calibration tokens of each expert that there was, where these were counted.
    """

    made_of: Sequence[Sequence[int]]
    tokens: Sequence[int] = ()


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


@dataclass(frozen=True, kw_only=True)
class DroppedResult(ReducedResult):
    """Result of dropping experts by number.

    Attributes:
        dropped: numbers of the experts that are gone.
        top_k: experts per token.
        sources: by new number, the model that each expert that is left came from; `None` where nothing says so.
    """

    ratio: float | None = None
    dropped: Sequence[int]
    top_k: int
    sources: Sequence[str | None]
