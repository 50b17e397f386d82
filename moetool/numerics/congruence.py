"""A S A^T for symmetric S, in fp64 or in fp32 with the outlier channels kept in fp64."""

import torch
from torch import Tensor

# More slabs save few operations and make the products too thin for the BLAS.
_BLOCKS = 4
# Where a channel carries this many times the median weight it goes through fp64.
_OUTLIER = 30.0


def outlier_channels(weight: Tensor) -> Tensor:
    """Indices of the channels whose weight dwarfs the others', at most a sixteenth of them.

    Args:
        weight: [n] non-negative, the channel's share of the energy (input energy times squared column norm).
    """
    count = min(int((weight > _OUTLIER * weight.median()).sum()), len(weight) // 16)
    return weight.topk(count).indices.sort().values


def symmetric_blocks(size: int) -> list[tuple[int, int]]:
    """Row ranges that cut the lower triangle of a [size, size] matrix into slabs."""
    step = max(64, -(-size // _BLOCKS))
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def mirror_lower(matrix: Tensor) -> Tensor:
    """Copy the strict lower triangle onto the upper one, in place and block by block."""
    for start, stop in symmetric_blocks(len(matrix)):
        square = matrix[start:stop, start:stop]
        square.copy_(square.tril() + square.tril(-1).T)
        matrix[:start, start:stop] = matrix[start:stop, :start].T
    return matrix


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """left @ right^T where that is known to be symmetric: only the lower slabs are computed. [m, n] x2 -> [m, m]."""
    out = left.new_empty(len(left), len(left))
    for start, stop in symmetric_blocks(len(left)):
        torch.mm(left[start:stop], right[:stop].T, out=out[start:stop, :stop])
    return mirror_lower(out)


def congruence(a: Tensor, s: Tensor) -> Tensor:
    """A S A^T in fp64. a: [m, n], s: [n, n] symmetric -> [m, m] fp64."""
    a = a.double()
    return inner_products(a @ s.double(), a)


def split_congruence(a: Tensor, s: Tensor, outliers: Tensor) -> tuple[Tensor, float]:
    """A S A^T with fp32 products for the ordinary channels and fp64 products for the outliers.

    The rounding error is then relative to the ordinary channels' part, however large the outliers are.

    Args:
        a: [m, n] fp32 or fp64.
        s: [n, n] symmetric, fp32 or fp64.
        outliers: [o] channel indices.

    Returns:
        the product [m, m] in fp64, and the Frobenius norm of the part that went through fp32.
    """
    ordinary = a.float() if a.dtype != torch.float32 else a.clone()
    ordinary[:, outliers] = 0
    low = inner_products(ordinary @ s.float(), ordinary)
    scale = float(torch.linalg.vector_norm(low, dtype=torch.float64))
    out = low.double()
    if len(outliers):
        # With r the ordinary and o the outlier channels: A_o B' + B A_o' where B = A_r S_ro + A_o S_oo / 2.
        picked = a[:, outliers].double()  # [m, o]
        columns = s[:, outliers].double()
        half = 0.5 * picked @ columns[outliers]
        columns[outliers] = 0
        for start in range(0, len(a), 1024):  # an fp64 copy of a slab of A, not of all of it
            half[start : start + 1024] += a[start : start + 1024].double() @ columns
        cross = picked @ half.T
        out += cross
        out += cross.T
    return out, scale
