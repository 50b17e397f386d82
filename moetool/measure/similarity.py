"""Similarity of experts, energy of their singular values, and cost of errors (D²-MoE §1, B.2, A.6, A.7).

Everything is computed in fp64, a copy of one or two matrices at a time, whatever the dtype of what is given.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Less variation than this share of a matrix's norm is what rounding left of none at all.
_ROUNDING = 1e-14
# Kernels are computed this many bytes at a time, all matrices together, but never fewer rows than these of each.
_SLAB_BYTES = 256_000_000
_SLAB_ROWS = 64


def pairwise_cka(matrices: Sequence[Tensor]) -> Tensor:
    """Linear centred kernel alignment of every pair of E matrices `[n, p_e]` over the same rows (Kornblith et al.,
    arXiv:1905.00414): `[E, E]` fp64 between 0 and 1, symmetric, NaN where all rows of one of the two are the same.

    `tr(KHLH) / √(tr(KHKH) tr(LHLH))` with the kernels `K = W₁ W₁ᵀ` and `L = W₂ W₂ᵀ` and the centring `H = I − 11ᵀ/n`.
    Eq. 11 of D²-MoE means this, and is misprinted. It is 1 for the same matrix up to a scale and an orthogonal
    transformation of its columns, and 0 if no direction of one varies with any of the other.

    With centred matrices `tr(KHLH) = ‖W₁ᵀ W₂‖²`, which is also the sum over the products of the kernels' elements. The
    first form takes a product of two matrices per pair, `2 n p²` operations each. The second takes every kernel once,
    `n² p` for its lower half, and next to nothing per pair. The cheaper is chosen: for E equal matrices the first if
    `n > (E + 1) p`, so mostly the second. Kernels are never whole in memory: slabs of their rows, of all matrices, are
    multiplied and forgotten. Beside what is given, that takes 256 MB (more if 64 rows need more) and one or two
    matrices in fp64. Mixtral-8x7B takes 7 · 10¹² operations for the gates of one layer and 2 · 10¹² for its down
    matrices.

    Raises:
        ValueError: the numbers of rows differ, or something is no matrix.
    """
    if len({len(matrix) for matrix in matrices}) > 1 or any(matrix.ndim != 2 for matrix in matrices):
        raise ValueError(f"CKA needs matrices with as many rows, got {[list(matrix.shape) for matrix in matrices]}")
    count, rows = len(matrices), len(matrices[0]) if matrices else 0
    means = [matrix.mean(0, dtype=torch.float64) for matrix in matrices]
    columns = [matrix.shape[1] for matrix in matrices]
    by_pair = rows * (sum(columns) ** 2 + sum(width**2 for width in columns))
    aligned = (_by_pair if by_pair < rows**2 * sum(columns) else _by_kernel)(matrices, means)
    varies = torch.tensor([_varies(matrix, mean) for matrix, mean in zip(matrices, means, strict=True)])
    norms = aligned.diagonal().sqrt()
    cka = (aligned / (norms[:, None] * norms)).clamp(0, 1)
    return torch.where(varies[:, None] & varies, cka, torch.full((count, count), torch.nan, dtype=torch.float64))


def _varies(matrix: Tensor, mean: Tensor) -> bool:
    centred, norm = matrix.double() - mean, torch.linalg.vector_norm(matrix, dtype=torch.float64)
    return bool(torch.linalg.vector_norm(centred) > _ROUNDING * norm)


def _by_pair(matrices: Sequence[Tensor], means: Sequence[Tensor]) -> Tensor:
    """`‖W_iᵀ W_j‖²` of the centred matrices from their products, `[E, E]`."""
    aligned = torch.zeros(len(matrices), len(matrices), dtype=torch.float64)
    for i in range(len(matrices)):
        left = (matrices[i].double() - means[i]).T
        for j in range(i + 1):
            aligned[i, j] = (left @ (matrices[j].double() - means[j])).square().sum()
    return aligned + aligned.tril(-1).T


def _by_kernel(matrices: Sequence[Tensor], means: Sequence[Tensor]) -> Tensor:
    """Alignments `[matrices, matrices]` by the kernels of the matrices, whose lower halves come in slabs of rows."""
    count, rows = len(matrices), len(matrices[0])
    aligned = torch.zeros(count, count, dtype=torch.float64)
    step = max(_SLAB_ROWS, _SLAB_BYTES // (8 * count * rows))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        slab = torch.empty(count, stop - start, stop, dtype=torch.float64)
        for kernel, matrix, mean in zip(slab, matrices, means, strict=True):
            centred = matrix[:stop].double() - mean
            torch.mm(centred[start:], centred.T, out=kernel)
        slab[:, :, :start] *= 2**0.5  # what lies left of the diagonal block counts for what lies above it, too
        flat = slab.view(count, -1)
        aligned += flat @ flat.T
    return (aligned + aligned.T) / 2


def energy_retention(matrix: Tensor, shares: Sequence[float]) -> Tensor:
    """The part of `Σ σ²` that the largest singular values hold (D²-MoE, Eq. 12).

    Args:
        matrix: `[out, in]`.
        shares: of the `min(out, in)` singular values, each from 0 to 1. Where a share is not a whole number of them,
            the next one counts in part.

    Returns:
        `[len(shares)]` fp64, from 0 to 1; NaN for a matrix of zeros. Takes the Gram matrix of the smaller side and its
        eigenvalues: `2 max(out, in) min(out, in)²` and about `1.3 min(out, in)³` operations.

    Raises:
        ValueError: a share is not between 0 and 1.
    """
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"shares of the singular values are numbers from 0 to 1, got {list(shares)}")
    wide = matrix.double()
    gram = wide @ wide.T if len(wide) <= wide.shape[1] else wide.T @ wide
    values = torch.linalg.eigvalsh(gram).flip(0).clamp_min(0)
    retained = torch.cat([values.new_zeros(1), values.cumsum(0)])
    retained = retained / retained[-1]
    position = torch.tensor(list(shares), dtype=torch.float64) * len(values)
    below = position.floor().long().clamp_max(len(values) - 1)
    return torch.lerp(retained[below], retained[below + 1], position - below)


def relative_error_cost(fisher: Tensor, matrix: Tensor) -> float:
    """Cost of an error of a given relative size spread evenly over a matrix: `tr F · ‖W‖² / (out · in)`.

    An error e in one weight costs about `½ F e²`. Errors with `‖ΔW‖ = ε ‖W‖` and no preferred direction have the mean
    square `ε² ‖W‖² / (out · in)` per weight, so they cost the result times `½ ε²`, in units in which layers and
    matrices can be compared. Those units are no nats: F, the square of the gradient of a whole window's mean loss,
    shrinks with the window.

    Args:
        fisher: `[out]`, the diagonal Fisher information summed over each row, as in `LayerStatistics`.
        matrix: `[out, in]`.
    """
    energy = torch.linalg.vector_norm(matrix, dtype=torch.float64).item() ** 2
    return fisher.sum(dtype=torch.float64).item() * energy / matrix.numel()
