"""Codes and scales that lose least at the output of a matrix, however numbers are coded.

Error feedback (`numerics.error_feedback`) chooses codes for given scales. What it codes is not the matrix alone, but
the matrix and what codes of inputs before left undone, the more of it, the fewer bits there are and the more inputs
tell of each other. So the scales that suit the nearest codes are too narrow, and those are tried that are wider by

    (flat / flatness)^(power · noise),

with the flatness of the inputs, what the nearest codes leave of a normal variable, and some powers; a few rows tell
which is best. Once codes are chosen, scales are fitted to them and stretched (`numerics.scale_fitting`). On small
trained models, in which inputs tell much of each other, wider scales leave .2 to .8 of the error at 1 bit that fitting
alone does, and .5 to .9 at 2 bits; where inputs tell as little of each other as in SmolLM2-135M they stay as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from moetool.numerics.error_feedback import Coded, Feedback
from moetool.numerics.row_feedback import LEAST_ROWS, Among, RowFeedback
from moetool.numerics.scale_fitting import fitted_scales

_FLAT = 0.35  # flatness from which on the scales of the nearest codes serve
POWERS = (0.5, 1.0, 1.4)  # by which wider scales are tried
_LEAST = 1.01  # times wider, below which nothing is tried
TRIED_ROWS = 32


class Coder(Protocol):
    """A way to code numbers under scales that are shared by groups of inputs.

    Attributes:
        least_rows: rows that are to be coded together at least, where rows are coded in turn.
        ahead: rows behind them that are coded with them, and then anew.
    """

    least_rows: ClassVar[int]
    ahead: ClassVar[int]

    @property
    def noise(self) -> Mapping[int, float]:
        """Share of a normal variable's energy that the nearest codes leave, by bits. Scales of other numbers of bits
        stay."""

    def fed_back(self, parts: Sequence[Coded], feedback: Feedback) -> list[Tensor]:
        """Codes [out, in] of every part that make good for each other's errors."""

    def decoded(self, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
        """Return the values `[out, in]` fp32 that codes `[out, in]` of `bits` bits stand for under `scales` `[out,
        groups]`."""

    def order(self, rows: int, bits: int) -> Tensor:
        """The order `[rows]` int64 in which rows can be coded some after the other."""

    def after(self, codes: Sequence[Tensor], among: Among) -> Self:
        """The coder of rows whose errors move each other, and that follow those of the last `codes` `[rows, in]`, if
        there are any, in that order."""


class EachByItself:
    """The part of a `Coder` that is the same wherever no number's code depends on those of other rows."""

    least_rows: ClassVar[int] = LEAST_ROWS
    ahead: ClassVar[int] = 0

    def order(self, rows: int, bits: int) -> Tensor:
        """Return the rows as they come: `[rows]` int64."""
        return torch.arange(rows)

    def after(self, codes: Sequence[Tensor], among: Among) -> Self:
        """Return the coder itself, whatever rows came before."""
        return self


def coded_for_outputs(
    parts: Sequence[Coded], coder: Coder, feedback: Feedback, *, keeps_size: bool = True
) -> list[tuple[Tensor, Tensor]]:
    """Find codes [out, in] and scales [out, groups] of least output error for several matrices with the same inputs.

    Args:
        parts: with the scales that suit the nearest codes, in the dtype they are stored in.
        coder: how numbers are coded.
        feedback: of the inputs.
        keeps_size: whether outputs shall be as large as they were, and not what loses least by itself.

    Raises:
        ValueError: there are other inputs behind the feedback, or values that are not finite.
    """
    parts = [_widened(*each) for each in zip(parts, _widths(parts, coder, feedback), strict=True)]
    fitted = partial(_fitted, coder=coder, feedback=feedback, keeps_size=keeps_size)
    return [
        (codes, fitted(part, codes) if part.bits in coder.noise else part.scales)
        for part, codes in zip(parts, coder.fed_back(parts, feedback), strict=True)
    ]


def coded_in_turn(
    count: int,
    start: Callable[[Tensor], Coded],
    coder: Coder,
    feedback: Feedback,
    rows: RowFeedback,
    *,
    keeps_size: bool = True,
) -> tuple[Tensor, Tensor]:
    """Find codes [count, in] and scales [count, groups] of least loss for the next rows, some after the other.

    Args:
        count: how many rows.
        start: finds scales that suit the nearest codes of some rows.
        coder: how numbers are coded.
        feedback: of the inputs.
        rows: gives the rows, in order, and takes what has become of them.
        keeps_size: whether outputs shall be as large as they were, and not what loses least by itself.

    Raises:
        ValueError: there are other inputs behind the feedback, or values that are not finite.
    """
    few = min(TRIED_ROWS, count)
    [width] = _widths([start(rows.coming(count)[:: count // few][:few])], coder, feedback)
    codes, scales = list[Tensor](), list[Tensor]()
    for size in rows.blocks(count, coder.least_rows):
        together = min(size + coder.ahead, count)
        part = _widened(start(rows.target(together)), width)
        own = coder.after(codes, rows.among(together))
        count -= size
        [found] = own.fed_back([part], feedback)
        part, found = Coded(part.matrix[:size], part.scales[:size], part.bits), found[:size]
        codes.append(found)
        is_fitted = part.bits in coder.noise
        scales.append(_fitted(part, found, own, feedback, keeps_size=keeps_size) if is_fitted else part.scales)
        rows.add(own.decoded(found, scales[-1], part.bits))
    return torch.cat(codes), torch.cat(scales)


def widest_scales(flatness: float, noise: float) -> float | None:
    """Find the factor, raised to the powers that are tried, by which wider scales may serve better than those of the
    nearest codes.

    Args:
        flatness: of the inputs (`Feedback`).
        noise: share of a normal variable's energy that the nearest codes leave.

    Returns:
        `None` where nothing need be tried.
    """
    widest: float = max(1.0, _FLAT / flatness) ** noise
    return widest if widest >= _LEAST else None


def _fitted(part: Coded, codes: Tensor, coder: Coder, feedback: Feedback, *, keeps_size: bool = False) -> Tensor:
    decoded = coder.decoded(codes, part.scales, part.bits)
    return fitted_scales(part.matrix, decoded, part.scales, feedback.gram, keeps_size=keeps_size)


def _widened(part: Coded, width: float) -> Coded:
    """Widen the scales of a part by a factor; as it is for a factor of 1."""
    return part if width == 1 else Coded(part.matrix, _times(part.scales, width), part.bits)


def _widths(parts: Sequence[Coded], coder: Coder, feedback: Feedback) -> list[float]:
    """By how much wider scales some rows of each part lose least; each trial by itself, as numbers of a trellis depend
    on those in other rows."""
    tried: dict[int, tuple[float, ...]] = {}  # how much wider, by part
    trials: list[Coded] = []
    for place, part in enumerate(parts):
        widest = widest_scales(feedback.flatness, coder.noise.get(part.bits, 0.0))
        if widest is not None:
            count = min(TRIED_ROWS, len(part.matrix))
            few = slice(0, count * (len(part.matrix) // count), len(part.matrix) // count)
            tried[place] = 1.0, *(widest**power for power in POWERS)
            trials += [Coded(part.matrix[few], _times(part.scales[few], width), part.bits) for width in tried[place]]
    coded = zip(trials, coder.fed_back(trials, feedback), strict=True)
    found = [1.0] * len(parts)
    for place, widths in tried.items():
        lost = _lost([next(coded) for _ in widths], coder, feedback)
        found[place] = widths[lost.index(min(lost))]
    return found


def _lost(trials: Sequence[tuple[Coded, Tensor]], coder: Coder, feedback: Feedback) -> list[float]:
    """What as many rows lose in each trial under fitted scales. Of few rows the sum of squares is that of the one or
    two with the largest errors, so it is the sum of the roots."""
    parts = [part for part, _ in trials]
    matrix, scales = torch.cat([part.matrix for part in parts]), torch.cat([part.scales for part in parts])
    decoded = torch.cat([coder.decoded(codes, part.scales, part.bits) for part, codes in trials])
    fitted = fitted_scales(matrix, decoded, scales, feedback.gram).chunk(len(trials))
    values = [coder.decoded(codes, own, part.bits) for (part, codes), own in zip(trials, fitted, strict=True)]
    lost: list[float] = feedback.output_errors(matrix - torch.cat(values)).sqrt().view(len(trials), -1).sum(1).tolist()
    return lost


def _times(scales: Tensor, factor: float) -> Tensor:
    """Multiply scales by a factor, in the dtype that they are stored in."""
    return (scales.float() * factor).to(scales.dtype)
