"""Few-bit codes that make up for each other's errors on the inputs a matrix is given (GPTQ, arXiv:2210.17323).

Columns are rounded one after the other; what rounding one of them does to the output is spread over the columns that
are still to come, by the inverse of the inputs' Gram matrix. Scales are those of rounding to nearest and stay.
"""

import torch
from torch import Tensor

from moetool.numerics.quantisation import levels, nearest, quantise

_BLOCK = 128  # columns between two updates of everything that is still to come
# Added to the diagonal relative to its mean: directions that calibration hardly saw must not be used up as a sink.
_DAMPING = 0.01


def quantise_with_feedback(
    matrix: Tensor, gram: Tensor, bits: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes and scales as of `quantise`, with a smaller error on the inputs.

    Args:
        matrix: [out, in], floating.
        gram: [in, in], sum of x x^T over the inputs x; positive semi-definite, may be singular.
        bits: bits per element.
        group: inputs that share a scale, a divisor of `in`.
        dtype: of the scales.

    Returns:
        codes [out, in] uint8 and scales [out, in / group] in `dtype`.

    Raises:
        ValueError: the Gram matrix has another size, or bits and group do not fit.
    """
    rows, columns = matrix.shape
    if gram.shape != (columns, columns):
        raise ValueError(f"gram must be [{columns}, {columns}], got {list(gram.shape)}")
    energy = gram.diagonal().double()
    codes, scales = quantise(matrix, bits, group, dtype, importance=energy)
    mean = float(energy.mean())
    if not mean > 0:
        return codes, scales
    # Columns that carry most come first, while there are many left to make up for them.
    order = energy.argsort(descending=True, stable=True)
    damped = gram.double()[order][:, order]
    damped.diagonal().add_(_DAMPING * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    spread = torch.linalg.cholesky(inverse, upper=True).float()  # row i says where the error of column i goes
    left = matrix.detach().float()[:, order].contiguous()
    wide = scales.float().repeat_interleave(group, dim=1)[:, order]
    grid = levels(bits, torch.float32, matrix.device)
    found = torch.empty_like(codes)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        errors = torch.empty(rows, stop - start, device=matrix.device)
        for column in range(start, stop):
            scale = wide[:, column]
            code = nearest(left[:, column], scale, bits)
            found[:, column] = code
            error = (left[:, column] - grid[code.int()] * scale) / spread[column, column]
            left[:, column + 1 : stop] -= error[:, None] * spread[column, column + 1 : stop]
            errors[:, column - start] = error
        left[:, stop:] -= errors @ spread[start:stop, stop:]
    codes[:, order] = found
    return codes, scales
