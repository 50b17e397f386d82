"""Codes chosen one input after the other, each making good for the errors of those before it.

Nearest codes minimise the error of every element by itself. What counts is the error of the output,
tr(E G E^T) for E [out, in] and the Gram matrix G of the inputs, in which errors of correlated inputs can cancel. As in
GPTQ (Frantar et al., arXiv:2210.17323), the error of input j is moved to the inputs that are still open by its least
squares solution, which the upper Cholesky factor of G^-1 holds row by row.
"""

import torch
from torch import Tensor

from moetool.numerics.quantization import dequantize, levels, nearest, nearest_levels

_DAMPING = 0.01  # of every input's own energy: relative to the mean it would drown ordinary inputs beside outliers
_SILENT = 1e-6  # share of the mean energy that inputs without any are given
_BLOCK = 64  # inputs after which the rest of the matrix is brought up to date


def feed_back(matrix: Tensor, scales: Tensor, bits: int, gram: Tensor) -> Tensor:
    """Codes with a smaller output error than the nearest ones, for given scales; no row's is larger.

    Args:
        matrix: [out, in], floating and finite.
        scales: [out, groups] as they will be stored, e.g. those of `quantize`.
        bits: of the codes.
        gram: [in, in], sum of x x^T over the inputs x; positive semi-definite, may be singular. All zero, as of a layer
            whose inputs are, it leaves every code the nearest.

    Returns:
        [out, in] uint8.

    Raises:
        ValueError: the Gram matrix has another shape, or is not finite.
    """
    rows, columns = matrix.shape
    wide = gram.to(matrix.device).double()
    energy = wide.diagonal()
    if wide.shape != (columns, columns) or not bool(wide.isfinite().all()):
        raise ValueError(f"error feedback needs a finite Gram matrix [{columns}, {columns}]")
    group = columns // scales.shape[1]
    plain = nearest(matrix.detach().float().view(rows, -1, group), scales.float().unsqueeze(2), bits).view(
        rows, columns
    )
    if not bool(energy.sum() > 0):
        return plain
    # Inputs that carry most come first, while there are many left to make good for them.
    order = energy.argsort(descending=True, stable=True)
    damped = (wide + torch.diag(_DAMPING * energy + _SILENT * energy.mean()))[order][:, order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor = torch.linalg.cholesky(inverse, upper=True).float()  # [in, in]
    grid, stored = levels(bits, torch.float32, matrix.device), scales.float()
    # [in, out] from here on: one input of all outputs lies side by side.
    each = stored.repeat_interleave(group, dim=1).T[order]
    open_ = matrix.detach().float().T[order]
    codes = torch.empty(columns, rows, dtype=torch.uint8, device=matrix.device)
    diagonal = factor.diagonal().tolist()
    for first in range(0, columns, _BLOCK):
        last = min(first + _BLOCK, columns)
        errors = torch.empty(last - first, rows, device=matrix.device)
        divisors = torch.where(each[first:last] > 0, each[first:last], 1)
        for column in range(first, last):
            values, error = open_[column], errors[column - first]
            chosen = nearest_levels(values / divisors[column - first], bits)
            codes[column] = chosen
            torch.addcmul(values, grid.index_select(0, chosen), each[column], value=-1, out=error)
            error /= diagonal[column]
            open_[column + 1 : last].addr_(factor[column, column + 1 : last], error, alpha=-1)
        open_[last:] -= factor[first:last, last:].T @ errors
    codes = torch.empty_like(codes).index_copy_(0, order, codes).T.contiguous()
    better = _output_error(matrix, codes, scales, bits, wide) <= _output_error(matrix, plain, scales, bits, wide)
    return torch.where(better[:, None], codes, plain)


def _output_error(matrix: Tensor, codes: Tensor, scales: Tensor, bits: int, gram: Tensor) -> Tensor:
    """e G e^T of every row: [out]."""
    error = dequantize(codes, scales.detach(), bits, torch.float64) - matrix.double()
    return ((error @ gram) * error).sum(1)
