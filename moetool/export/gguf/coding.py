"""A matrix in llama.cpp's blocks: the nearest codes, or those that lose least at the output of the matrix.

Scales and minima are fitted first, to the nearest codes. Under them codes make good for each other's errors
(`numerics.error_feedback`); what is coded then is not the matrix alone, so with few levels wider scales are tried, as
in `numerics.output_codes`. After that codes and scales are moved to where least is lost (`export.gguf.descent`), and
every row is stretched until its output is as large as it was (`numerics.scale_fitting` says why).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moetool.export.gguf.blocked import Blocked, first_scales, fp16, inverse, levels_of, nearest_codes, with_scales
from moetool.export.gguf.descent import Descent
from moetool.export.gguf.lattice import TOGETHER, best_in_list
from moetool.format.gguf_blocks import BlockType, LatticeType
from moetool.numerics.error_feedback import DAMPING, Feedback, better_codes
from moetool.numerics.output_codes import POWERS, TRIED_ROWS, widest_scales
from moetool.numerics.work import Work
from moetool.representations.work import feeding_back

_SWEEPS = 3  # after the third they take a few percent of the error at 2 bits, and less at more
_NOISE = {4: 0.1, 8: 0.03}  # by levels: share of a normal variable's energy that the nearest codes leave
_AT_ONCE = 1 << 20  # numbers, so that errors and their images stay in the cache
_MOST_STRETCHED = 2.0
_SILENT = 1e-6  # share of the mean energy that inputs without any are given


def block_codes(matrix: Tensor, kind: BlockType, feedback: Feedback | None = None) -> Blocked:
    """A matrix in blocks.

    Args:
        matrix: `[out, in]`, floating and finite; blocks divide `in`.
        kind: of blocks.
        feedback: of the inputs; `None` for the nearest codes.

    Raises:
        ValueError: there are other inputs behind the feedback.
    """
    inputs = matrix.detach().float().T.contiguous()
    if feedback is None:
        return with_scales(inputs, kind, *first_scales(inputs, kind, inputs.new_ones(len(inputs))))
    feedback.check(len(inputs))
    gram = feedback.gram.clone()
    diagonal = gram.diagonal()
    diagonal.mul_(1 + DAMPING).add_(_SILENT)
    scale, minimum = first_scales(inputs, kind, diagonal)
    width = _width(inputs, kind, scale, minimum, feedback)
    found = _fed_back(inputs, with_scales(inputs, kind, scale * width, minimum * width), feedback)
    step = max(1, _AT_ONCE // len(inputs))
    for start in range(0, inputs.shape[1], step):
        part = slice(start, start + step)
        own = Blocked(kind, *(numbers[:, part].contiguous() for numbers in _numbers(found)))
        descent = Descent(inputs[:, part].contiguous(), own, gram)
        for _ in range(_SWEEPS):
            descent.sweep()
        _stretch(descent)
        for numbers, better in zip(_numbers(found), _numbers(own), strict=True):
            numbers[:, part] = better
    return found


def choosing_blocks(shape: Sequence[int], tokens: int) -> Work:
    """The work of choosing the blocks of a tensor `[…, out, in]` on so many tokens, Gram matrices among it."""
    *matrices, rows, columns = shape
    given = Work(products={"float32": tokens * columns**2 / 2})
    return given + math.prod(matrices) * (1 + _SWEEPS) * feeding_back((rows, columns))


def _numbers(blocked: Blocked) -> tuple[Tensor, ...]:
    return blocked.codes, blocked.scales, blocked.minima, blocked.d, blocked.dmin


class _Grid:
    """Levels under the scales and minima of groups."""

    def __init__(self, blocked: Blocked) -> None:
        self._kind, self._scale, self._minimum = blocked.kind, blocked.scale(), blocked.minimum()
        self._over = inverse(self._scale)

    def nearest(self, values: Tensor, group: int, codes: Tensor) -> Tensor:
        place = (values + self._minimum[group]).mul_(self._over[group])
        codes.copy_(nearest_codes(self._kind, place))
        return levels_of(self._kind, codes).mul_(self._scale[group]).sub_(self._minimum[group])


def _fed_back(inputs: Tensor, nearest: Blocked, feedback: Feedback) -> Blocked:
    """Codes that make good for each other's errors, in rows where the nearest lose more."""
    if isinstance(nearest.kind, LatticeType):
        return _points_fed_back(inputs, nearest, nearest.kind, feedback)
    errors = (inputs - nearest.decoded()).T.contiguous()
    codes = better_codes(
        inputs[feedback.order], errors, nearest.codes.T.contiguous(), _Grid(nearest), len(nearest.scales), feedback
    )
    nearest.codes = codes.T.contiguous()
    return nearest


def _points_fed_back(inputs: Tensor, nearest: Blocked, kind: LatticeType, feedback: Feedback) -> Blocked:
    """The same of points: those of 8 inputs make good for all errors before them.

    With G = R R^T for an upper R in an order of the inputs, the error of a row e is |e R|^2. Of it the columns of 8
    inputs hold the errors of these and of all before. So their point is to be near what cancels the rest, in the metric
    of these columns.
    """
    energy = feedback.gram.diagonal().unflatten(0, (-1, TOGETHER)).sum(1)
    first = energy.argsort(descending=True, stable=True) * TOGETHER
    order = (first[:, None] + torch.arange(TOGETHER, device=first.device)).flatten()
    gram = feedback.gram.clone()
    gram.diagonal().mul_(1 + DAMPING).add_(_SILENT)
    factor = torch.linalg.cholesky(gram[order][:, order].flip(0, 1)).flip(0, 1)
    errors, codes, scale = inputs[order], torch.empty_like(nearest.codes), nearest.scale()
    for start in range(0, len(order), TOGETHER):
        part, own = slice(start, start + TOGETHER), order[start : start + TOGETHER]
        block = factor[part, part]
        # (e + c) R for the part's own columns, where c R is what the errors before leave in them
        moved = torch.linalg.solve_triangular(block.T, factor[:start, part].T @ errors[:start], upper=False)
        group = int(own[0]) // kind.group
        found = best_in_list(kind, (errors[part] + moved).mul_(inverse(scale[group])), block @ block.T)
        codes[own] = found
        errors[part] -= levels_of(kind, found).mul_(scale[group])
    fed = (factor.T @ errors).square_().sum(0)
    before = (factor.T @ (inputs - nearest.decoded())[order]).square_().sum(0)
    nearest.codes = torch.where(fed < before, codes, nearest.codes)
    return nearest


def _width(inputs: Tensor, kind: BlockType, scale: Tensor, minimum: Tensor, feedback: Feedback) -> float:
    """How many times wider scales shall be than suits the nearest codes: what serves a few rows best."""
    widest = widest_scales(feedback, _NOISE.get(kind.resolution, 0.0))
    if widest is None:
        return 1.0
    rows = slice(0, None, max(1, inputs.shape[1] // TRIED_ROWS))
    few, scale, minimum = inputs[:, rows], scale[:, rows], minimum[:, rows]

    def lost(width: float) -> float:
        own = _fed_back(few, with_scales(few, kind, scale * width, minimum * width), feedback)
        return feedback.output_errors((few - own.decoded()).T).sqrt().sum().item()

    return min((1.0, *(widest**power for power in POWERS)), key=lost)


def _stretch(descent: Descent) -> None:
    """Multiply every row by what gives its output the size that it had, as far as it points where it did."""
    own, inputs = descent.blocked, descent.inputs
    image = descent.gram @ inputs
    whole, left = (image * inputs).sum(0), (image * own.decoded()).sum(0)
    times = (whole * inverse(left)).nan_to_num(1.0).clamp(1.0, _MOST_STRETCHED)
    own.d, own.dmin = fp16(own.d * times), fp16(own.dmin * times)
