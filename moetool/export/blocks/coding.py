"""A matrix in blocks: the nearest codes, or those that lose least at the output of the matrix.

Scales and minima are fitted first, to the nearest codes. Under them codes make good for each other's errors
(`export.blocks.feeding`); what is coded then is not the matrix alone, so with few levels wider scales are tried, as
in `numerics.output_codes`. After that codes and scales are moved to where least is lost (`export.blocks.descent`), and
with few levels every row is stretched until its output is as large as it was (`numerics.scale_fitting` says why).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.calibration.output_metric import ExpertMetric
from moetool.checkpoint.writer import check_finite
from moetool.export.blocks.blocked import Blocked, first_scales, inverse, nearest_blocks, with_scales
from moetool.export.blocks.descent import Descent
from moetool.export.blocks.feeding import fed_back
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.format.blocks import BlockLayout
from moetool.numerics.output_codes import POWERS, TRIED_ROWS, widest_scales
from moetool.numerics.row_feedback import LEAST_ROWS, RowFeedback, RowMetric
from moetool.numerics.work import Work
from moetool.representations.work import coding_in_turn, feeding_back, nearest_codes

_SWEEPS = 3  # after the third they take a few percent of the error at 2 bits, and less at more
_NOISE = {4: 0.1, 8: 0.03}  # by levels: share of a normal variable's energy that the nearest codes leave
_AT_ONCE = 1 << 22  # numbers
_STRETCHED = 8  # levels, at most; with more, whole models lose as much or more when rows are stretched
_MOST_STRETCHED = 2.0
_LATTICE_BYTES = 4000  # per number, to find its point of a list


def block_codes(
    matrix: Tensor, kind: BlockLayout, given: PreparedGram | None = None, outputs: RowMetric | None = None
) -> Blocked:
    """A matrix in blocks.

    Args:
        matrix: `[out, in]`, floating and finite; blocks divide `in`.
        kind: of blocks.
        given: inputs of the matrix; `None` for the nearest codes.
        outputs: how errors in its rows count together; `None` if each row counts by itself.

    Raises:
        ValueError: there are other inputs.
    """
    matrix = matrix.detach()
    step = max(1, _AT_ONCE // matrix.shape[1])
    if given is None:
        return Blocked.joined([nearest_blocks(part.float().T.contiguous(), kind) for part in matrix.split(step)])
    given.check(matrix.shape[1])
    width = _width(matrix[:: max(1, len(matrix) // TRIED_ROWS)].float().T.contiguous(), kind, given)
    if outputs is not None:
        noise = torch.full((len(matrix),), _NOISE.get(kind.resolution, 0.0))
        rows = RowFeedback(outputs, torch.arange(len(matrix), device=matrix.device), matrix.float(), noise)
        parts = []
        for count in rows.blocks(len(matrix), LEAST_ROWS):
            parts.append(_chosen(rows.target(count).T.contiguous(), kind, given, width))
            rows.add(parts[-1].decoded().T)
        return Blocked.joined(parts)
    return Blocked.joined([_chosen(part.float().T.contiguous(), kind, given, width) for part in matrix.split(step)])


def expert_codes(
    matrices: Iterable[tuple[str, Role, Tensor, BlockLayout]], given: PreparedGram | None, metric: ExpertMetric
) -> Iterator[tuple[str, Blocked]]:
    """Yield matrices of an expert in blocks, each making good for the errors of those before it.

    Args:
        matrices: on the same inputs: name, role, `[out, in]` where they are to be coded, and kind of blocks.
        given: their inputs.
        metric: how errors count together.

    Raises:
        InvalidInputError: numbers that are not finite.
    """
    errors = dict[Role, Tensor]()
    for name, role, matrix, kind in matrices:
        check_finite(name, matrix)
        whole = matrix.float()
        blocked = block_codes(metric.target(role, whole, errors), kind, given, metric.rows(role))
        errors[role] = whole - blocked.decoded().T
        yield name, blocked


def preparing_inputs(shape: Sequence[int], tokens: int) -> Work:
    """The work of preparing the Gram matrices of the inputs of a tensor `[…, out, in]` on so many tokens."""
    *matrices, _, columns = shape
    return Work(products={"float32": tokens * columns**2 / 2}, cholesky={columns: math.prod(matrices)})


def nearest_blocks_work(shape: tuple[int, int], kind: BlockLayout) -> Work:
    """The work of finding scales that suit the nearest codes of a matrix `[out, in]`, and these codes."""
    return nearest_codes(math.prod(shape), (kind.resolution - 1).bit_length())


def choosing_blocks(shape: Sequence[int], kind: BlockLayout, *, in_turn: bool = False) -> Work:
    """The work of choosing the blocks of a tensor `[…, out, in]` in a type, once its inputs are prepared, of its rows
    alike or in turn."""
    *matrices, rows, columns = shape
    once = replace(feeding_back((rows, columns)), cholesky={})
    if kind.is_lattice:
        once += Work(moved=_LATTICE_BYTES * rows * columns)
    found = (1 + _SWEEPS) * once
    return math.prod(matrices) * (found + coding_in_turn((rows, columns)) if in_turn else found)


def _chosen(inputs: Tensor, kind: BlockLayout, given: PreparedGram, width: float) -> Blocked:
    """The blocks of some rows `[in, out]` that lose least."""
    scale, minimum = first_scales(inputs, kind, given.gram.diagonal())
    found = fed_back(inputs, with_scales(kind, scale * width, minimum * width), given)
    descent = Descent(inputs, found, given.gram)
    for _ in range(_SWEEPS):
        descent.sweep()
    if kind.resolution > _STRETCHED:
        return found
    times = inverse(descent.shares()).clamp(1.0, _MOST_STRETCHED)
    found.d, found.dmin = kind.as_unit(found.d * times), kind.as_unit(found.dmin * times)
    return found


def _width(few: Tensor, kind: BlockLayout, given: PreparedGram) -> float:
    """How many times wider scales shall be than suits the nearest codes: what serves a few rows `[in, out]` best."""
    widest = widest_scales(given.flatness, _NOISE.get(kind.resolution, 0.0))
    if widest is None:
        return 1.0
    scale, minimum = first_scales(few, kind, given.gram.diagonal())

    def lost(width: float) -> float:
        own = fed_back(few, with_scales(kind, scale * width, minimum * width), given)
        return given.output_errors((few - own.decoded()).T).sqrt().sum().item()

    return min((1.0, *(widest**power for power in POWERS)), key=lost)
