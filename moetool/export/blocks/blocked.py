"""Matrices in blocks: their numbers as tensors, and the scales that suit the nearest codes.

Tensors here are `[in, out]`, `[groups, out]` or `[blocks, out]`: what one input is given by all outputs lies side by
side, as error feedback goes from input to input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from moetool.export.blocks import compiled_blocks
from moetool.export.blocks.lattice import nearest_in_list
from moetool.format.blocks import BlockLayout

# Scales tried, by the share of the one that holds a group's largest number; fewer levels want smaller ones.
_CLIPS = {
    4: (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    8: (0.6, 0.7, 0.8, 0.9, 1.0),
    16: (0.75, 0.82, 0.89, 0.96, 1.02),
    32: (0.88, 0.94, 1.0),
}
_MANY = (0.98, 1.0)


@dataclass
class Blocked:
    """A matrix `[out, in]` in blocks, which are changed in place.

    Attributes:
        kind: of its blocks.
        codes: `[in, out]` uint8.
        scales, minima: `[groups, out]` fp32, whole: the codes of scales and minima.
        d, dmin: `[blocks, out]` fp32, as they are stored (`BlockLayout.unit`).
    """

    kind: BlockLayout
    codes: Tensor
    scales: Tensor
    minima: Tensor
    d: Tensor
    dmin: Tensor

    @property
    def groups_per_block(self) -> int:
        """Number of groups of a block, which share its `d` and `dmin`."""
        return self.kind.numbers // self.kind.group

    @classmethod
    def joined(cls, parts: Sequence["Blocked"]) -> Self:
        """The rows of several matrices with as many inputs in blocks of one type, one below the other."""
        return cls(parts[0].kind, *(torch.cat(own, 1) for own in zip(*(part.numbers for part in parts), strict=True)))

    def span(self, first: int, last: int) -> Self:
        """A view of the blocks of every row from `first` to before `last`, through which they can be changed."""
        numbers, groups = self.kind.numbers, self.groups_per_block
        of_groups, blocks = slice(first * groups, last * groups), slice(first, last)
        codes, own = self.codes[first * numbers : last * numbers], (self.scales[of_groups], self.minima[of_groups])
        return type(self)(self.kind, codes, *own, self.d[blocks], self.dmin[blocks])

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        """All that the blocks hold: codes, scales, minima, `d` and `dmin`."""
        return self.codes, self.scales, self.minima, self.d, self.dmin

    def effective(self) -> tuple[Tensor, Tensor]:
        """Scale and minimum of every group, `[groups, out]`: those of its block times its own codes."""
        count = self.groups_per_block
        return self.d.repeat_interleave(count, 0) * self.scales, self.dmin.repeat_interleave(count, 0) * self.minima

    def decoded(self) -> Tensor:
        """Decode the blocks to a matrix `[in, out]` fp32, bit by bit as llama.cpp does its own."""
        values, (scale, minimum) = (
            levels_of(self.kind, self.codes).unflatten(0, (-1, self.kind.group)),
            self.effective(),
        )
        return values.mul_(scale[:, None]).sub_(minimum[:, None]).flatten(0, 1)


def levels_of(kind: BlockLayout, codes: Tensor) -> Tensor:
    """Map codes to the levels that they stand for, before scales, in fp32 and their shape."""
    if kind.is_even:
        return codes.float().add_(kind.levels[0])
    return torch.tensor(kind.levels, dtype=torch.float32, device=codes.device)[codes.int()]


def nearest_levels(kind: BlockLayout, places: Tensor) -> Tensor:
    """The level nearest to each place, fp32; `places` are overwritten."""
    if kind.is_even:
        return places.round_().clamp_(kind.levels[0], kind.levels[-1])
    return levels_of(kind, nearest_codes(kind, places))


def nearest_codes(kind: BlockLayout, places: Tensor) -> Tensor:
    """The code of the level nearest to each place, uint8; `places` are overwritten."""
    if kind.is_lattice:
        found = compiled_blocks.nearest_points if compiled_blocks.runs_on(kind, places) else nearest_in_list
        return found(kind, places)
    if kind.is_even:
        return nearest_levels(kind, places).sub_(kind.levels[0]).to(torch.uint8)
    return _between(kind, places)


def _between(kind: BlockLayout, places: Tensor) -> Tensor:
    found = torch.zeros_like(places, dtype=torch.uint8)
    for low, high in pairwise(kind.levels):  # faster than bucketize
        found += places > (low + high) / 2
    return found


def nearest_scales(kind: BlockLayout, places: Tensor) -> Tensor:
    """The code of a scale nearest to each place; `places` are overwritten."""
    low, high = kind.scale_range
    return places.sub_(low).div_(kind.scale_step).round_().mul_(kind.scale_step).add_(low).clamp_(low, high)


def inverse(numbers: Tensor) -> Tensor:
    """Compute 1 / x element by element, and 0 where x is 0."""
    return torch.where(numbers == 0, 0, 1 / torch.where(numbers == 0, 1, numbers))


def first_scales(inputs: Tensor, kind: BlockLayout, energy: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima `[groups, out]` under which the nearest codes of every group lose little.

    Of several scales, each made the best for its codes by least squares, the one that loses least.

    Args:
        inputs: `[in, out]` fp32.
        kind: of blocks.
        energy: `[in]` fp32, how much the squared error of each input counts.
    """
    weights = energy + 1e-6 * energy.mean() + torch.finfo(torch.float32).tiny
    clips = _CLIPS.get(kind.resolution, _MANY)
    if compiled_blocks.runs_on(kind, inputs):
        return compiled_blocks.fit_scales(kind, inputs, weights, clips)
    return fit_scales(kind, inputs, weights, clips)


def fit_scales(kind: BlockLayout, inputs: Tensor, energy: Tensor, clips: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Find scales and minima as `first_scales` does, in plain torch, trying `clips` times the span of each group."""
    numbers = inputs.unflatten(0, (-1, kind.group))
    weights = energy.unflatten(0, (-1, kind.group))[..., None]
    low = numbers.amin(1)
    if kind.has_minimum:
        low = low.clamp_max(0) if kind.minimum_range[0] == 0 else low
        span = (numbers.amax(1) - low) / kind.levels[-1]
        starts = [(span * clip, -low * clip) for clip in clips]
    else:
        high = numbers.amax(1)
        largest = torch.where(high > -low, high, low) / kind.levels[0]
        largest = largest.abs() if kind.is_symmetric else largest
        signs = (1, -1) if len(kind.levels) <= 16 and not kind.is_symmetric else (1,)
        starts = [(largest * clip * sign, torch.zeros_like(low)) for clip in clips for sign in signs]
    best, found = torch.full_like(low, torch.inf), starts[-1]
    for scale, minimum in starts:
        scale, minimum = _least_squares(numbers, weights, kind, scale, minimum)
        values = nearest_levels(kind, (numbers + minimum[:, None]).mul_(inverse(scale)[:, None]))
        lost = values.mul_(scale[:, None]).sub_(minimum[:, None]).sub_(numbers).square_().mul_(weights).sum(1)
        better = lost < best
        best = torch.where(better, lost, best)
        found = torch.where(better, scale, found[0]), torch.where(better, minimum, found[1])
    return found


def _least_squares(
    numbers: Tensor, weights: Tensor, kind: BlockLayout, scale: Tensor, minimum: Tensor
) -> tuple[Tensor, Tensor]:
    """Scale and minimum that are best for the nearest codes under those given."""
    values = nearest_levels(kind, (numbers + minimum[:, None]).mul_(inverse(scale)[:, None]))
    weighted = values * weights
    qq, qx = (weighted * values).sum(1), (weighted * numbers).sum(1)
    alone = qx * inverse(qq)
    if not kind.has_minimum:
        return alone, minimum
    q, x, one = weighted.sum(1), (numbers * weights).sum(1), weights.sum(1)
    determinant = qq * one - q * q
    usable = determinant > 1e-6 * qq * one
    fitted = (qx * one - q * x) * torch.where(usable, inverse(determinant), 0)
    shift = (q * fitted - x) / one
    usable &= fitted > 0
    if kind.minimum_range[0] == 0:
        positive = usable & (shift > 0)
        return torch.where(positive, fitted, alone), torch.where(positive, shift, 0)
    return torch.where(usable, fitted, scale), torch.where(usable, shift, minimum)


def with_scales(kind: BlockLayout, scale: Tensor, minimum: Tensor) -> Blocked:
    """Blocks without codes under scales and minima `[groups, out]`, rounded to what blocks hold."""
    scales, d = _coded(scale, kind, kind.scale_range)
    minima, dmin = _coded(minimum, kind, kind.minimum_range)
    scales = nearest_scales(kind, scales)
    minima = minima.round_().clamp_(*kind.minimum_range)
    codes = torch.empty(len(scale) * kind.group, scale.shape[1], dtype=torch.uint8, device=scale.device)
    return Blocked(kind, codes, scales, minima, d, dmin)


def nearest_blocks(inputs: Tensor, kind: BlockLayout) -> Blocked:
    """Blocks of a matrix `[in, out]` fp32 with its nearest codes."""
    blocked = with_scales(kind, *first_scales(inputs, kind, inputs.new_ones(len(inputs))))
    scale, minimum = blocked.effective()
    places = (inputs.unflatten(0, (-1, kind.group)) + minimum[:, None]).mul_(inverse(scale)[:, None])
    blocked.codes.copy_(nearest_codes(kind, places).flatten(0, 1))
    return blocked


def _coded(numbers: Tensor, kind: BlockLayout, limits: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes `[groups, out]` before rounding, and what they are multiplied with, `[blocks, out]`."""
    low, high = limits
    by_block = numbers.unflatten(0, (-1, kind.numbers // kind.group))
    if low == high:
        return torch.full_like(numbers, high), kind.as_unit(by_block[:, 0] * high)
    largest = by_block.gather(1, by_block.abs().argmax(1, keepdim=True))[:, 0]
    unit = kind.as_unit(largest / (low if low < 0 else high))
    return (by_block * inverse(unit)[:, None]).flatten(0, 1), unit
