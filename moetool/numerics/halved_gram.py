"""A second moment from few windows of text, whose pairs of numbers count as far as two halves of the windows agree.

With A over half of the windows and B over the others, noise in them is independent: over all pairs of numbers <A, B> is
the energy of what both have in common, and <A + B, A + B> / 4 that and what noise adds to it. Their ratio is the factor
by which pairs are multiplied so that least is expected to be wrong (the optimal intensity of Ledoit & Wolf, 2004, whose
estimate takes samples, here tokens of one window, to be independent). Numbers count alike: as correlations. Kinds of
text take turns in a text, so that halves take them by the Thue-Morse sequence, which gives both of them all kinds.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moetool.numerics.gram import Gram

_ROWS = 1024  # of a matrix that are compared at a time


class HalvedGram:
    """The sum of x x^T over rows of windows, whose pairs are shrunk.

    Args:
        size: length of a row.
        length: rows of a window.
        first: number of windows in the text before those that are added here.
        device: where the rows come from, and two matrices [size, size] fp32 live.
    """

    def __init__(self, size: int, length: int, first: int, device: torch.device | str) -> None:
        self._length, self._first, self._next = length, first, first
        self._halves = Gram(size, device, torch.float32), Gram(size, device, torch.float32)

    @property
    def size(self) -> int:
        """The length of the rows that are added, and of the matrix's sides."""
        return self._halves[0].size

    @property
    def windows(self) -> int:
        """The number of windows that were added here."""
        return self._next - self._first

    def add(self, rows: Tensor) -> None:
        """Add the rows `[windows · length, size]` of the next windows; raises `ValueError` for parts of windows."""
        windows = rows.unflatten(0, (-1, self._length))
        is_second = in_second_half(self._next + torch.arange(len(windows), device=rows.device))
        for gram, own in zip(self._halves, (~is_second, is_second), strict=True):
            if bool(own.any()):
                gram.add(windows[own].flatten(0, 1))
        self._next += len(windows)

    def reduce(self, all_reduce: Callable[[Tensor], object]) -> None:
        """Add up, by a function that does so in place, what several processes have seen of windows of their own."""
        for half in self._halves:
            all_reduce(half.matrix())

    def matrix(self) -> Tensor:
        """The symmetric sum `[size, size]` fp32, pairs shrunk; of one window its diagonal alone."""
        one, other = (half.matrix() for half in self._halves)
        return shrunk(one + other, one)


def in_second_half(windows: Tensor) -> Tensor:
    """Whether windows, by their number in a text, are in the second of its halves: bool of that shape."""
    found = windows.clone()
    for bits in (32, 16, 8, 4, 2, 1):
        found ^= found >> bits
    return (found & 1).bool()


def shrunk(both: Tensor, one: Tensor) -> Tensor:
    """Shrink the pairs of a sum `both` [size, size] fp32, of which `one` is of half of the windows, in place; returns
    it."""
    own = both.diagonal().clone()
    both.mul_(_agreement(one, both, own)).diagonal().copy_(own)
    return both


def _agreement(one: Tensor, both: Tensor, energy: Tensor) -> float:
    """The factor, from 0 to 1, on all pairs of a sum `both`, of which `one` is a half."""
    unit = torch.where(energy > 0, energy.rsqrt(), 0)
    common = whole = 0.0
    for rows in torch.arange(len(both), device=both.device).split(_ROWS):
        scale = unit[rows, None] * unit
        scale[torch.arange(len(rows)), rows] = 0  # not of themselves
        half, own = one[rows] * scale, both[rows] * scale
        common += float((half * (own - half)).sum(dtype=torch.float64))
        whole += float(own.square().sum(dtype=torch.float64))
    return min(max(4 * common / whole, 0.0), 1.0) if whole else 0.0
