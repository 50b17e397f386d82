"""Sweeps of `descent` over the blocks of a span in plain torch: on a card, and where there is no compiler.

Group by group a scale code and a minimum code are set to the best that there is, then every code; and before, block by
block, the numbers that scale and minimum codes are multiplied with.
"""

import torch
from torch import Tensor

from moetool.export.blocks.blocked import (
    Blocked,
    inverse,
    levels_of,
    nearest_codes,
    nearest_levels,
    nearest_scales,
)
from moetool.export.blocks.lattice import TOGETHER, best_in_list
from moetool.format.blocks import BlockLayout


def descend(blocked: Blocked, gram: Tensor, image: Tensor) -> None:
    """Improve the blocks of a span once.

    Args:
        blocked: of the span.
        gram: `[in, in]` fp32, of the span's inputs.
        image: `[in, out]` fp32, the errors of all inputs times the Gram matrix, of the span's inputs; overwritten.
    """
    _Span(blocked, gram, image).improve()


class _Span:
    def __init__(self, blocked: Blocked, gram: Tensor, image: Tensor) -> None:
        self._own, self._gram, self._image, self._values = blocked, gram, image, blocked.decoded()

    def improve(self) -> None:
        kind, count = self._own.kind, self._own.groups_per_block
        for block in range(len(self._own.d)):
            self._set_units(block)
            for group in range(block * count, (block + 1) * count):
                part = slice(group * kind.group, (group + 1) * kind.group)
                before, image = self._values[part].clone(), self._image[part].clone()
                if count > 1:
                    self._set_scale(group, part, image)
                self._set_codes(group, part, image)
                self._image.addmm_(self._gram[:, part], self._values[part] - before, alpha=-1)

    def _set_units(self, block: int) -> None:
        """The best `d` and `dmin` of a block for the codes that it has."""
        own, kind, count = self._own, self._own.kind, self._own.groups_per_block
        part, groups = (
            slice(block * kind.numbers, (block + 1) * kind.numbers),
            slice(block * count, (block + 1) * count),
        )
        gram, image = self._gram[part, part], self._image[part]
        levels = levels_of(kind, own.codes[part])
        a = levels.unflatten(0, (-1, kind.group)).mul_(own.scales[groups][:, None]).flatten(0, 1)
        under = gram @ a
        aa, ax = (a * under).sum(0), (a * image).sum(0)
        if not kind.has_minimum:
            d = kind.as_unit(own.d[block] + ax * inverse(aa))
            dmin = own.dmin[block]
        else:
            b = own.minima[groups].repeat_interleave(kind.group, 0)
            bb, ab, bx = (b * (gram @ b)).sum(0), (b * under).sum(0), (b * image).sum(0)
            determinant = aa * bb - ab * ab
            usable = determinant > 1e-4 * aa * bb
            over = torch.where(usable, inverse(determinant), 0)
            d = own.d[block] + torch.where(usable, (ax * bb - ab * bx) * over, ax * inverse(aa))
            dmin = own.dmin[block] - torch.where(usable, (bx * aa - ab * ax) * over, 0)
            d, dmin = kind.as_unit(d), kind.as_unit(dmin)
        found = Blocked(kind, own.codes[part], own.scales[groups], own.minima[groups], d[None], dmin[None]).decoded()
        change = found.sub_(self._values[part])
        better = _gain(change, image, gram @ change) > 0
        own.d[block] = torch.where(better, d, own.d[block])
        own.dmin[block] = torch.where(better, dmin, own.dmin[block])
        change.mul_(better)
        self._values[part] += change
        self._image.addmm_(self._gram[:, part], change, alpha=-1)

    def _set_scale(self, group: int, part: slice, image: Tensor) -> None:
        """The best codes of a group's scale and minimum; the `image` of its own inputs follows."""
        own, kind = self._own, self._own.kind
        block = group // own.groups_per_block
        d, dmin, scale, minimum = own.d[block], own.dmin[block], own.scales[group], own.minima[group]
        gram, a = self._gram[part, part], levels_of(kind, own.codes[part])
        under = gram @ a
        aa, ax = (a * under).sum(0), (a * image).sum(0)
        low, high = kind.scale_range
        if not kind.has_minimum:
            best = nearest_scales(kind, scale + ax * inverse(aa * d))
            step = (best - scale) * d
            best = torch.where(step * (2 * ax - step * aa) > 0, best, scale)
            own.scales[group] = best
            self._move(part, a * (best * d), image)
            return
        bb, ab, bx = gram.sum(), under.sum(0), image.sum(0)
        determinant = (aa * bb - ab * ab).clamp_min(1e-6 * aa * bb)
        ideal = scale + (ax * bb - ab * bx) * inverse(determinant * d)
        best_gain, best, best_minimum = torch.zeros_like(d), scale, minimum
        for place in (ideal.floor(), ideal.ceil(), scale):
            tried = place.clamp(low, high)
            step = (tried - scale) * d
            # Of v = a s − m, m is best where the rest of the error has no mean under the Gram matrix.
            other = (minimum + (step * ab - bx) * inverse(bb * dmin)).round_().clamp_(*kind.minimum_range)
            shift = (other - minimum) * dmin
            gain = 2 * (step * ax - shift * bx) - step * (step * aa - 2 * shift * ab) - shift * shift * bb
            better = gain > best_gain
            best_gain, best = torch.where(better, gain, best_gain), torch.where(better, tried, best)
            best_minimum = torch.where(better, other, best_minimum)
        own.scales[group], own.minima[group] = best, best_minimum
        self._move(part, a * (best * d) - best_minimum * dmin, image)

    def _move(self, part: slice, values: Tensor, image: Tensor) -> None:
        image.addmm_(self._gram[part, part], values - self._values[part], alpha=-1)
        self._values[part] = values

    def _set_codes(self, group: int, part: slice, image: Tensor) -> None:
        """The best code of every input of a group, one after the other."""
        own, kind = self._own, self._own.kind
        block = group // own.groups_per_block
        scale, minimum = own.d[block] * own.scales[group], own.dmin[block] * own.minima[group]
        over, gram, values = inverse(scale), self._gram[part, part], self._values[part]
        if kind.is_lattice:
            own.codes[part] = self._set_points(kind, scale, gram, values, image, own.codes[part])
            return
        for index, energy in enumerate(gram.diagonal().tolist()):
            now = values[index]
            place = torch.add(now, image[index], alpha=1 / energy).add_(minimum).mul_(over)
            found = nearest_levels(kind, place).mul_(scale).sub_(minimum)
            image.addr_(gram[:, index], found - now, alpha=-1)
            values[index] = found
        own.codes[part] = nearest_codes(kind, (values + minimum).mul_(over))

    def _set_points(
        self, kind: BlockLayout, scale: Tensor, gram: Tensor, values: Tensor, image: Tensor, codes: Tensor
    ) -> Tensor:
        """The best points of a group, those of 8 inputs one after the other; `values` and `image` follow."""
        over = inverse(scale)
        for start in range(0, kind.group, TOGETHER):
            part = slice(start, start + TOGETHER)
            metric, now = gram[part, part], values[part].clone()
            place = torch.linalg.solve(metric, image[part]).add_(now).mul_(over)
            found = best_in_list(kind, place, metric)
            change = levels_of(kind, found).mul_(scale).sub_(now)
            better = _gain(change, image[part], metric @ change) > 0
            change.mul_(better)
            codes[part] = torch.where(better, found, codes[part])
            values[part] = torch.where(better, levels_of(kind, found).mul_(scale), now)
            image.addmm_(gram[:, part], change, alpha=-1)
        return codes


def _gain(change: Tensor, image: Tensor, under: Tensor) -> Tensor:
    """`[out]`: how much less is lost after a change of values."""
    return (change * (2 * image - under)).sum(0)
