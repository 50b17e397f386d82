"""Mixtures of bits that the rows of a matrix are offered in.

Where rows count so differently that the logarithms of what they count are about normal, so are the bits that lose
least in all. A mixture is such a distribution, rounded: a mean and a spread.
"""

from collections.abc import Sequence
from statistics import NormalDist

from moetool.representations.mixed_rows import MOST_WIDTHS, ROW_SHARES, ROW_UNIT, MixedRows, TrellisRows

_SPREADS = (0.5, 1.0, 1.5)  # in bits: of rows that count two, four and eight times as much as others
_STEP = 0.5  # in bits, from one mean to the next
_QUANTILES = [NormalDist().inv_cdf((place + 0.5) / ROW_SHARES) for place in range(ROW_SHARES)]


def row_mixtures(bits: Sequence[int], group: int, matrix: tuple[int, int], *, trellis: bool) -> list[MixedRows]:
    """For a matrix `[out, in]`: mixtures of none and of these `bits` up to 4, with groups of `group`; in trellises if
    that is wanted and can be. None where there are too few rows to tell apart.

    Raises:
        ValueError: only groups of one would fit.
    """
    few = [own for own in bits if own <= 4]
    if not few or matrix[0] < ROW_SHARES * ROW_UNIT:
        return []
    kind = TrellisRows if trellis and matrix[0] % ROW_UNIT == 0 else MixedRows
    steps = range(int(min(few) / 2 / _STEP), int(max(few) / _STEP) + 1)
    found = {_shares(_STEP * step, spread, few) for step in steps for spread in _SPREADS}
    return [kind(shares, group).fitted(matrix) for shares in sorted(found) if sum(map(bool, shares)) > 1]


def _shares(mean: float, spread: float, bits: Sequence[int]) -> tuple[int, ...]:
    """How many parts of all rows have 0, 1 … bits."""
    near = sorted(bits, key=lambda own: abs(own - mean))[:MOST_WIDTHS]
    shares = [0] * (max(near) + 1)
    for quantile in _QUANTILES:
        wanted = mean + spread * quantile
        shares[min((0, *near), key=lambda own: abs(own - wanted))] += 1
    while not shares[-1]:
        shares.pop()
    return tuple(shares)
