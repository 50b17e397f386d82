"""Few-bit codes with one scale per group of inputs, chosen for the least squared error.

A matrix [out, in] is cut along its inputs into groups of equal length; an element is `level[code] * scale[group]`.

- 1 bit: levels -1 and 1. The best scale is then the mean magnitude of the group.
- 2, 3, 4 bits: the levels that minimise the squared error of a normal variable (J. Max, "Quantizing for minimum
  distortion", IRE Trans. Inform. Theory, 1960). Expert weights and their differences are close to normal within a
  group (kurtosis 3.0 to 3.2 on a trained model), and levels learnt from the matrix itself were at most 0.6 % better.
- 5, 6 and 8 bits: the whole numbers from -15, -31 and -127 on, up to the same above zero, so that zero stays zero.
  Levels for a normal variable would be no better where a group's largest value sets its scale.

Rounding to the nearest level of a grid that ends at the group's largest value leaves a relative error of about .765,
.272, .117 at 2, 3, 4 bits (groups of 128 weights); the levels above with searched scales .338, .178, .089.

All levels are bf16 numbers, so that `level * scale` is the same whether it is rounded once or computed in bf16. The
scale is rounded to its storage dtype first and the codes are chosen for the rounded one, which makes the rounding of
scales a second-order effect.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moetool.numerics.compiled_rounding import CompiledRounding
from moetool.numerics.groups import ELEMENTS, check_group, in_parts, weights_of

BITS = (1, 2, 3, 4, 5, 6, 8)

_NORMAL_LEVELS = {
    2: (0.453125, 1.5078125),
    3: (0.2451171875, 0.7578125, 1.34375, 2.15625),
    4: (0.1279296875, 0.388671875, 0.65625, 0.94140625, 1.2578125, 1.6171875, 2.0625, 2.734375),
}
_CANDIDATES = {2: 5, 3: 6, 4: 8, 5: 5, 6: 5, 8: 5}  # scales tried per group
# Tried around the best of them, in steps from one to the next: then 30 candidates are .03, .06, .14 % better.
_NEAR = (-0.33, 0.33)
_RANGE, _CELLS = 4, 512  # of the tables: beyond all levels, cells per unit
_REFINEMENTS = 2  # rounds of codes for the scale, scale for the codes


def is_whole(bits: int) -> bool:
    """Whether the levels of codes with `bits` bits are consecutive integers, as they are above 4 bits."""
    return bits > max(_NORMAL_LEVELS)


def largest(bits: int) -> int:
    """The largest of the whole numbers that codes of so many bits stand for; the lowest is as far below zero."""
    return (1 << (bits - 1)) - 1


def levels_size(bits: int) -> float:
    """About the root mean square of the values that codes of a group stand for, before scaling: of normal levels one,
    of whole numbers a third of the largest."""
    return largest(bits) / 3 if is_whole(bits) else 1.0


@cache
def levels(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The [2^bits] values that codes stand for, before scaling; ascending.

    Raises:
        ValueError: `bits` is not one of `BITS`.
    """
    if bits not in BITS:
        raise ValueError(f"codes have {', '.join(map(str, BITS))} bits, not {bits}")
    with torch.inference_mode(False):  # what is kept must serve training too
        if is_whole(bits):
            end = largest(bits)
            return (torch.arange(1 << bits, device=device) - end).clamp_max(end).to(dtype)
        upper = torch.tensor((1.0,) if bits == 1 else _NORMAL_LEVELS[bits])
        return torch.cat([-upper.flip(0), upper]).to(dtype).to(device)


def quantize(
    matrix: Tensor, bits: int, group: int, dtype: torch.dtype, *, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales with a small (at 1 bit: the least) weighted squared error.

    The scale search tries several starting points per group, each with the best scale for its codes, two more around
    the best of them, and refines that; no step makes the error larger.

    Args:
        matrix: [out, in], floating.
        bits: one of `BITS`.
        group: inputs that share a scale, a divisor of `in`.
        dtype: of the scales.
        importance: [in], non-negative, how much the squared error of each input counts, e.g. the diagonal of the
            activations' Gram matrix; None for all the same.

    Returns:
        codes [out, in] uint8 and scales [out, in / group] in `dtype`.

    Raises:
        ValueError: bits, group or importance do not fit, or values that are not finite.
    """
    rows, columns = matrix.shape
    check_group(columns, group)
    weights = weights_of(importance, columns, group, matrix.device)
    scales = torch.empty(rows, columns // group, dtype=dtype, device=matrix.device)
    for part, values in in_parts(matrix, group):
        # Groups are brought to unit size, so that no square under- or overflows.
        size = values.abs().amax(2, keepdim=True)
        unit = values / torch.where(size > 0, size, 1)
        scales[part] = (_search(unit, weights, bits) * size).squeeze(2).to(dtype)
    return nearest_codes(matrix, scales, bits), scales


def nearest_codes(matrix: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The codes of a matrix [out, in] whose levels are nearest under scales [out, groups]: [out, in] uint8.

    Raises:
        ValueError: values that are not finite.
    """
    rows, columns = matrix.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=matrix.device)
    for part, values in in_parts(matrix, columns // scales.shape[1]):
        codes[part] = nearest(values, scales[part].float().unsqueeze(2), bits).view(-1, columns)
    return codes


def dequantize(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] that codes [out * in] or [out, in] uint8 and scales [out, groups] stand for, in `dtype`."""
    rows, groups = scales.shape
    grid, lines = levels(bits, dtype, codes.device), codes.reshape(rows, -1)
    values = torch.empty(lines.shape, dtype=dtype, device=codes.device)
    factor = scales.to(dtype).unsqueeze(2)
    needs_graph = scales.requires_grad and torch.is_grad_enabled()
    step = max(1, min(rows, ELEMENTS // max(1, lines.shape[1])))
    # The wider indices of all codes at once would not fit any cache, and new memory for each part takes as long.
    indices = torch.empty(step, lines.shape[1], dtype=torch.int32, device=codes.device)
    for start in range(0, rows, step):
        part = values[start : start + step]
        index = indices[: len(part)].copy_(lines[start : start + step])
        torch.index_select(grid, 0, index.view(-1), out=part.view(-1))
        if not needs_graph:
            part.view(len(part), groups, -1).mul_(factor[start : start + step])
    return (values.view(rows, groups, -1) * factor).view(rows, -1) if needs_graph else values


def nearest(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes of the levels nearest to values / scales; any code where the scale is zero. uint8."""
    ratio = values / torch.where(scales > 0, scales, 1)
    if bits == 1:
        return (ratio >= 0).to(torch.uint8)
    if is_whole(bits):
        end = largest(bits)
        return ratio.round_().clamp_(-end, end).add_(end).to(torch.uint8)
    cells = (ratio * _CELLS).add_(_RANGE * _CELLS).clamp_(0, 2 * _RANGE * _CELLS - 1).int().view(-1)
    table = _table(bits, ratio.device)
    codes = table.codes.index_select(0, cells)
    return codes.add_(ratio.view(-1) > table.edges.index_select(0, cells)).view_as(ratio)


class Lookup(CompiledRounding):
    """Levels nearest to numbers that share one row of scales, or next to these within a thousandth of a boundary."""

    def __init__(self, bits: Sequence[tuple[int, int]], scales: Tensor) -> None:
        """`scales` [groups, n] fp32, of so many numbers of so many bits, one after the other; nothing is allocated for
        a number later on.

        Raises:
            ValueError: codes that are whole numbers, and others.
        """
        if len(bits) > 1 and any(is_whole(own) for own, _ in bits):
            raise ValueError("whole numbers of one number of bits are rounded by themselves")
        inverse = 1 / torch.where(scales > 0, scales, 1)
        if is_whole(bits[0][0]):
            end = largest(bits[0][0])
            super().__init__(scales, inverse, -end, end)
            return
        super().__init__(scales, inverse * _CELLS, _RANGE * _CELLS, 2 * _RANGE * _CELLS - 1)
        self._index = torch.empty_like(self._value, dtype=torch.int32)
        self._zero = torch.full_like(self._value, self._first)
        tables = [_table(own, scales.device) for own, _ in bits]
        self._tables = tables[0].nearest, tables[0].levels
        if len(bits) > 1:
            self._tables = torch.cat([own.nearest for own in tables]), torch.cat([own.levels for own in tables])
            starts = [start for place, (_, count) in enumerate(bits) for start in [place * 2 * _RANGE * _CELLS] * count]
            self._starts = torch.tensor(starts, dtype=torch.int32, device=scales.device)

    def nearest(self, values: Tensor, group: int, codes: Tensor) -> Tensor:
        """Round `values` [n] to the nearest levels: writes `codes` [n] uint8, returns the numbers that they stand for.

        The result is a buffer that the next call overwrites.
        """
        if self._tables is None:
            return super().nearest(values, group, codes)
        place = torch.addcmul(self._zero, values, self._inverse[group], out=self._value)
        index, (nearest, levels) = self._index.copy_(place.clamp_(0, self._last)), self._tables
        if self._starts is not None:
            index += self._starts
        torch.index_select(nearest, 0, index, out=codes)
        torch.index_select(levels, 0, index, out=place)
        return place.mul_(self._scales[group])


class _Table(NamedTuple):
    """What is nearest in every cell between -4 and 4, which takes a twentieth of the time of bisection.

    Attributes:
        codes: of the lowest level that is nearest to a number in the cell; uint8.
        edges: the number above which it is the next level; fp32.
        nearest: the code at the middle of the cell; uint8.
        levels: the level of that; fp32.
    """

    codes: Tensor
    edges: Tensor
    nearest: Tensor
    levels: Tensor


@cache
def _table(bits: int, device: torch.device) -> _Table:
    grid = levels(bits, torch.float32, device)
    with torch.inference_mode(False):
        boundaries = (grid[1:] + grid[:-1]) / 2
        starts = torch.arange(2 * _RANGE * _CELLS, device=device) / _CELLS - _RANGE
        # Sums that end just below a cell are rounded into it.
        lowest = torch.bucketize(starts - 1e-3 / _CELLS, boundaries)
        middle = torch.bucketize(starts + 0.5 / _CELLS, boundaries)
        edges = torch.cat([boundaries, boundaries.new_tensor([torch.inf])])[lowest]
        return _Table(lowest.to(torch.uint8), edges, middle.to(torch.uint8), grid[middle])


def _search(unit: Tensor, weights: Tensor, bits: int) -> Tensor:
    """Scales [rows, groups, 1] for groups [rows, groups, group] whose largest magnitude is 1, or 0."""
    if bits == 1:
        return _fit(unit, weights, torch.ones_like(unit[..., :1]), bits)[0]
    grid = levels(bits, torch.float32, unit.device)
    top, count = 1 / grid[-1], _CANDIDATES[bits]  # the first reaches the largest value of the group
    if is_whole(bits):  # every candidate clips a little of the group's tail
        low, high = (torch.full_like(unit[..., :1], float(top * share)) for share in (0.85, 1.0))
    else:
        spread = (unit.square() * weights).mean(2, keepdim=True).div(weights.mean(2, keepdim=True)).sqrt()
        low, high = 0.7 * spread, torch.maximum(1.25 * spread, 1.05 * top)
    step = (high / low.clamp_min(1e-12)).log() / (count - 1)
    start = low
    best, gain = _fit(unit, weights, low, bits)
    for place in range(1, count):
        tried = low * (step * place).exp()
        scale, found = _fit(unit, weights, tried, bits)
        better = found > gain
        best, start, gain = torch.where(better, scale, best), torch.where(better, tried, start), found.maximum(gain)
    for beside in _NEAR:
        scale, found = _fit(unit, weights, start * (step * beside).exp(), bits)
        best, gain = torch.where(found > gain, scale, best), found.maximum(gain)
    for _ in range(_REFINEMENTS):
        best, _ = _fit(unit, weights, best, bits)
    return best


def _fit(unit: Tensor, weights: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The best scales for the codes that belong to `scales`, and how much squared error they explain."""
    chosen = _nearly_nearest(unit / torch.where(scales > 0, scales, 1), bits)
    weighted = chosen * weights
    product = (weighted * unit).sum(2, keepdim=True)
    norm = weighted.mul_(chosen).sum(2, keepdim=True)
    fitted = product / torch.where(norm > 0, norm, 1)
    return fitted.clamp_min_(0), product * fitted


def _nearly_nearest(ratio: Tensor, bits: int) -> Tensor:
    """The level nearest to each `ratio`, or next to it in the small neighbourhood of a boundary. Overwrites `ratio`."""
    if bits == 1:
        return torch.where(ratio >= 0, 1.0, -1.0)
    if is_whole(bits):
        return ratio.round_().clamp_(-largest(bits), largest(bits))
    cells = ratio.mul_(_CELLS).add_(_RANGE * _CELLS).clamp_(0, 2 * _RANGE * _CELLS - 1).int()
    return _table(bits, ratio.device).levels.index_select(0, cells.view(-1)).view_as(ratio)
