"""Codes of blocks that make good for each other's errors, chosen input by input, or point by point.

With G = R R^T for an upper R in an order of the inputs, the error of a row e is |e R|^2. Of it the columns of an input
hold its own error and those of all inputs before. So its code is to be near what cancels the rest; and the point of 8
inputs in the metric of their columns. `numerics.error_feedback` does that for codes of other layouts.
"""

import torch
from torch import Tensor

from moetool.export.blocks import compiled_blocks
from moetool.export.blocks.blocked import Blocked, inverse, levels_of, nearest_codes
from moetool.export.blocks.lattice import TOGETHER, best_in_list
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.format.blocks import BlockLayout

_RUN = 64  # inputs between which errors are moved one by one; beyond, by products of matrices


def fed_back(inputs: Tensor, nearest: Blocked, given: PreparedGram) -> Blocked:
    """Codes that make good for each other's errors.

    Args:
        inputs: `[in, out]` fp32, what blocks are to stand for.
        nearest: blocks with scales, whose codes are changed.
        given: to the matrix.
    """
    kind, groups, (scales, minima) = nearest.kind, given.order // nearest.kind.group, nearest.effective()
    errors, codes = inputs[given.order], torch.empty_like(nearest.codes)
    feed = compiled_blocks.feed_back if compiled_blocks.runs_on(kind, inputs) else feed_back
    for start in range(0, len(errors), _RUN):
        part = slice(start, start + _RUN)
        moved = given.factor[:start, part].T @ errors[:start]
        feed(kind, given.factor[part, part], moved, groups[part], scales, minima, errors[part], codes[part])
    nearest.codes.index_copy_(0, given.order, codes)
    return nearest


def feed_back(
    kind: BlockLayout,
    factor: Tensor,
    moved: Tensor,
    groups: Tensor,
    scales: Tensor,
    minima: Tensor,
    errors: Tensor,
    codes: Tensor,
) -> None:
    """Choose the codes of some inputs in plain torch, as on a card, or where no compiler is.

    Args:
        kind: of blocks.
        factor: `[n, n]`, of these inputs.
        moved: `[n, out]`, errors of inputs before, times the factor; overwritten.
        groups: `[n]`, to which each input belongs.
        scales: `[groups, out]`, effective.
        minima: `[groups, out]`, effective.
        errors: `[n, out]`, what is to be coded; then what codes leave of it.
        codes: `[n, out]` uint8, written.
    """
    step, of_each = TOGETHER if kind.is_lattice else 1, groups.tolist()
    for start in range(0, len(errors), step):
        part, group = slice(start, start + step), of_each[start]
        block, scale, minimum = factor[part, part], scales[group], minima[group]
        makes_good = torch.linalg.solve_triangular(block.T, moved[part], upper=False)
        place = (errors[part] + makes_good + minimum).mul_(inverse(scale))
        found = best_in_list(kind, place, block @ block.T) if kind.is_lattice else nearest_codes(kind, place)
        codes[part] = found
        errors[part] -= levels_of(kind, found).mul_(scale).sub_(minimum)
        moved[start + step :].addmm_(factor[part, start + step :].T, errors[part])
