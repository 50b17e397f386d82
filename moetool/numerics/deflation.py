"""Leading eigenpairs of an ill conditioned fp64 matrix at the price of an fp32 solver.

The eigenvalues of a whitened weight span many orders of magnitude because a few input channels are huge. fp32
resolves eigenvalues down to about 1e-7 of the largest, so the few dominating directions are taken out in fp64 first;
what remains is well conditioned and goes to the fp32 solver.
"""

import torch
from torch import Tensor

from moetool.numerics.eigen import top_eigh

# An fp32 eigenvalue this far below the largest still has an accurate direction: over 3 shapes, 3 spectra, 7
# conditionings and 6 ranks no projection accepted by this rule exceeded the optimal error by more than 0.04 %.
FP32_RESOLUTION = 1e-5
# Energy that the outer directions may leak into the remainder, relative to the error of the truncation.
LEAK_LIMIT = 1e-6
_STEPS = 4


def deflated_top_eigh(matrix: Tensor, k: int, resolution: float = FP32_RESOLUTION) -> tuple[Tensor, Tensor] | None:
    """The k leading eigenpairs of a positive semi-definite fp64 matrix, or None where fp32 cannot resolve them.

    Args:
        matrix: [n, n] fp64, symmetric, positive semi-definite up to rounding.
        k: how many pairs, 0 < k <= n.
        resolution: the share of the largest eigenvalue down to which fp32 is trusted.

    Returns:
        values [k] fp64, descending, and vectors [n, k] fp64, whose span loses at most a 1e-5 share of the truncation
        error in ordinary cases; None when `values[-1]` lies below `resolution` of the deflated matrix' norm.
    """
    outer_values, outer, leak = _outer_directions(matrix, k)
    inner_matrix, scale = _deflated(matrix, outer)
    if not scale > 0:
        return None
    values, vectors = top_eigh(inner_matrix, k - len(outer_values))
    if not bool((values[-1] > 0) & (values[-1] >= resolution * values[0])):
        return None
    inner = vectors.double()
    inner -= outer @ (outer.T @ inner)  # fp32 rounding leaves a trace of the outer directions in the inner ones
    all_values = torch.cat([outer_values, values.double() * scale])
    tail = float(matrix.diagonal().sum() - all_values.sum())
    if k < len(matrix) and leak > LEAK_LIMIT * tail:
        return None
    return all_values, torch.cat([outer, inner], dim=1)


def deflated_eigenvalues(matrix: Tensor) -> Tensor:
    """All eigenvalues [n] fp64, descending, of a positive semi-definite fp64 matrix [n, n].

    Their errors are about 1e-6 of the largest beside the dominating ones. One that is small beside that may be
    negative.
    """
    outer_values, outer, _ = _outer_directions(matrix, len(matrix))
    inner_matrix, scale = _deflated(matrix, outer)
    values = torch.linalg.eigvalsh(inner_matrix)[len(outer_values) :].double() * max(scale, 0.0)
    return torch.cat([outer_values, values]).sort(descending=True).values


def _deflated(matrix: Tensor, outer: Tensor) -> tuple[Tensor, float]:
    """What `outer` [n, o] leaves of a matrix, fp32 and divided by its scale: fp32 has a short range of exponents."""
    inner_matrix = matrix
    if outer.shape[1]:
        # (I - QQ') M (I - QQ') = M - QW' - WQ' with W = MQ - Q(Q'MQ)/2, one rank-2o update.
        product = matrix @ outer
        half = torch.addmm(product, outer, outer.T @ product, alpha=-0.5)
        inner_matrix = torch.addmm(matrix, torch.cat([outer, half], 1), torch.cat([half, outer], 1).T, alpha=-1)
    scale = float(inner_matrix.diagonal().max())
    narrow = torch.empty_like(inner_matrix, dtype=torch.float32)
    return torch.mul(inner_matrix, 1 / scale if scale > 0 else 1.0, out=narrow), scale


def _outer_directions(matrix: Tensor, k: int) -> tuple[Tensor, Tensor, float]:
    """The dominating eigenpairs that a short subspace iteration settles: values [o], vectors [n, o], leaked energy.

    A direction q with Ritz value t and residual norm r loses r^2 / t of energy when its coupling to the rest is
    dropped; leading directions are kept while the sum of that stays far below the energy of the rest.
    """
    n = len(matrix)
    width = min(max(8, n // 50), k - 1)
    if width <= 0:
        return matrix.new_zeros(0), matrix.new_zeros(n, 0), 0.0
    generator = torch.Generator().manual_seed(n)
    block = torch.randn(n, width, generator=generator, dtype=torch.float64).to(matrix.device)
    for _ in range(_STEPS):
        block = torch.linalg.qr(matrix @ block).Q
    product = matrix @ block
    values, rotation = torch.linalg.eigh(block.T @ product)
    values, rotation = values.flip(0), rotation.flip(1)
    block, product = block @ rotation, product @ rotation
    residual = (product - block * values).square().sum(0)
    leak = (residual / values.clamp_min(torch.finfo(torch.float64).tiny)).cumsum(0)
    rest = float(matrix.diagonal().sum() - values.sum())
    kept = int(((leak <= 1e-8 * rest) & (values > 0)).cumprod(0).sum())
    return values[:kept], block[:, :kept], float(leak[kept - 1]) if kept else 0.0
