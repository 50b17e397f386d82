"""Best low-rank approximation of a weight delta in the norm of the activations it sees.

Minimising ||(delta - U V) X||_F (SVD-LLM, arXiv:2403.07378; D2-MoE, arXiv:2502.17298, Eq. 6-8) has the solution
P P^T delta, with P the leading left singular vectors of delta L, for any L with L L^T = X X^T. No inverse of L is
needed, so nothing blows up when the activations do not span the input space.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moetool.numerics.congruence import inner_products
from moetool.numerics.output_norm import OutputNorm
from moetool.numerics.precision import bf16_products, fp32_products_are_exact, has_fast_bf16
from moetool.numerics.whitened import directions_of, left_directions, right_directions, small_square, spectrum_of

Side = Literal["left", "right"]

# Beyond this ratio of pivots the normal equations lose most of fp64's digits.
_CONDITION_LIMIT = 1e6
_COARSE_CONDITION_LIMIT = 100.0  # and fp32 most of its
_TINY = torch.finfo(torch.float64).tiny
_SMALLEST = 1e-24  # mean of squares that fp32 holds to all of its digits


@dataclass(frozen=True)
class Factorization:
    """Nested optimal projections of one delta [out, in]: the first k columns of `basis` serve rank k.

    Attributes:
        spectrum: fp64 [r], squared whitened singular values, descending, >= 0, in units of squared output.
        energy: ||delta L||_F^2; the squared error of rank k is `energy - spectrum[:k].sum()`.
        basis: fp32. Side "left": P [out, r], left singular vectors of delta L. Side "right": Y [in, r] with
            delta @ Y orthonormal (equal to P); columns are zero where the delta itself has run out of rank.
        side: which of the two `basis` holds; the right one only of a delta with more outputs than inputs.
    """

    spectrum: Tensor
    energy: float
    basis: Tensor
    side: Side


def factorize(
    delta: Tensor,
    *,
    gram: Tensor | None = None,
    output_gram: Tensor | None = None,
    rank: int | None = None,
    root: Tensor | None = None,
    coarse: bool = False,
) -> Factorization:
    """Decompose `delta` so that any rank up to `rank` can be cut from the result by `truncate`.

    With a rank, fp32 does the heavy work where its resolution suffices (the smallest kept eigenvalue at least that of
    the largest once outlier channels and dominating directions were taken out in fp64); otherwise fp64 does it all.

    Args:
        delta: [out, in] fp32 (other floating dtypes are converted).
        gram: [in, in] fp64, sum of x x^T over tokens; positive semi-definite, may be singular. Any square root gives
            the same result.
        output_gram: [out, out] fp64, sum of (delta x)(delta x)^T, where the input Gram would be too large.
            Neither means plain SVD (Eckart-Young).
        rank: at most this many directions; None for all min(out, in) of them, in fp64 throughout.
        root: `square_root` of the Gram matrix, where it was made before.
        coarse: the factors will be rounded to 8 bits or fewer. Then directions may lose as much as that does.

    Returns:
        the factorization, on the device of `delta`; equal input gives equal bytes.

    Raises:
        ValueError: both Grams given, shapes that do not fit, or a rank out of range.
    """
    delta = _checked(delta, gram, output_gram)
    rows, columns = delta.shape
    full = min(rows, columns)
    if rank is not None and not 0 <= rank <= full:
        raise ValueError(f"rank {rank} is out of range for a delta [{rows}, {columns}]")
    kept = full if rank is None else rank
    fp32 = rank is not None and _fp32_is_exact(delta)
    if output_gram is not None:
        found = directions_of(output_gram.double(), kept, fp32=fp32, coarse=coarse)
    elif rows <= columns:
        found = left_directions(delta, gram, kept, fp32=fp32, coarse=coarse)
    else:
        found = right_directions(delta, gram, root, kept, fp32=fp32, coarse=coarse)
    side: Side = "left" if found.is_left else "right"
    return Factorization(found.values, found.energy, _fix_signs(found.basis).float(), side)


def spectrum(
    delta: Tensor, *, gram: Tensor | None = None, output_gram: Tensor | None = None, root: Tensor | None = None
) -> tuple[Tensor, float]:
    """Compute the fields `spectrum` and `energy` that `factorize` returns, to a few digits and without directions.

    The arguments are those of `factorize`. On a CPU, products are taken in the precision that is fastest; errors are
    about 1e-6 of the mean eigenvalue that outlier channels leave.
    """
    delta = _checked(delta, gram, output_gram)
    fp32 = _fp32_is_exact(delta)
    square = small_square(delta, gram, root, fp32=fp32) if output_gram is None else output_gram.double()
    return spectrum_of(square, fp32=fp32), float(square.diagonal().sum().clamp_min(0))


def _fp32_is_exact(delta: Tensor) -> bool:
    return delta.device.type == "cpu" and fp32_products_are_exact()


def _checked(delta: Tensor, gram: Tensor | None, output_gram: Tensor | None) -> Tensor:
    """The delta in fp32. Raises `ValueError` unless there is one Gram matrix at most, and it fits."""
    delta = delta.detach().float()
    rows, columns = delta.shape
    if gram is not None and output_gram is not None:
        raise ValueError("give the input Gram or the output Gram, not both")
    for name, matrix, size in (("gram", gram, columns), ("output_gram", output_gram, rows)):
        if matrix is not None and matrix.shape != (size, size):
            raise ValueError(
                f"{name} must be [{size}, {size}] for a delta [{rows}, {columns}], got {list(matrix.shape)}"
            )
    return delta


def truncate(
    delta: Tensor, factorization: Factorization, rank: int, dtype: torch.dtype, *, norm: OutputNorm | None = None
) -> tuple[Tensor, Tensor]:
    """The optimal rank-`rank` factors of `delta`, rounded to `dtype`.

    U is rounded first and V is the least-squares solution against the rounded U: for any U of full column rank
    V = U^+ delta minimises the whitened error whatever the whitening, so U's rounding error is absorbed except for
    what leaves its column space. The two are then balanced, direction by direction: what U owes to the norm or to a
    long side would otherwise be left to V, beyond the range of fp16 and of what an optimizer's steps suit.

    Args:
        delta: [out, in], the matrix that was factorized, before the norm was applied.
        factorization: of this delta, or of `norm.times(delta)`.
        rank: 0 <= rank <= the number of columns in the basis.
        dtype: of the factors as they will be stored.
        norm: of errors at the outputs, if it is not the plain one; the factors are those of the delta itself, best
            in this norm.

    Returns:
        u [out, rank] and v [rank, in] in `dtype`; delta is approximated by u @ v.

    Raises:
        ValueError: the rank is out of range.
    """
    u = leading(delta, factorization, rank, dtype, norm=norm)
    u = u.to(dtype).to(u.dtype)
    delta, scaled = delta.detach().float().to(u.dtype), u
    if norm is not None:
        relative = norm.relative()
        delta, scaled = relative.times(delta), relative.times(u)
    v = refit(delta, scaled, coarse=dtype == torch.bfloat16)
    powers = balancing_powers(u, v)
    return (u * powers).to(dtype), (v / powers[:, None]).to(dtype)


def leading(
    delta: Tensor, factorization: Factorization, rank: int, dtype: torch.dtype, *, norm: OutputNorm | None
) -> Tensor:
    """Left factor U `[out, rank]` of the optimal factors, before it is rounded to `dtype`, in fp64, or in fp32 where
    that is enough; its columns have root mean squares near 1. Arguments and errors are those of `truncate`."""
    available = factorization.basis.shape[1]
    if not 0 <= rank <= available:
        raise ValueError(f"rank {rank} was asked of a factorization with {available} directions")
    wide = dtype == torch.float64 or delta.device.type != "cpu" or not fp32_products_are_exact()
    work = torch.float64 if wide else torch.float32
    basis = factorization.basis[:, :rank].to(work)
    if factorization.side == "left":
        return unit_columns(basis if norm is None else norm.relative().undone(basis))
    return unit_columns(delta.detach().float().to(work) @ basis)


def unit_columns(u: Tensor) -> Tensor:
    """Every column of u [out, k] times a power of two that brings its root mean square near 1; zeros stay."""
    return u / _nearest_power(_root_mean_square(u, 0)).to(u.dtype)


def balancing_powers(u: Tensor, v: Tensor) -> Tensor:
    """Powers of two [k], in the dtype of u, to multiply u [out, k] by and to divide v [k, in] by, so that both have
    like sizes.

    Column i of u and row i of v then have root mean squares within a factor of 2 of each other. Among all factors of a
    product these are the ones that optimizer steps of one size disturb least. Powers of two, so that u v stays the
    same, bit by bit, in every binary format that holds both.
    """
    left, right = _root_mean_square(u, 0), _root_mean_square(v, 1)
    # Where one of the two is zero so is the product, however long the other: its norm becomes 1.
    ratio = torch.where(right > 0, right / left, 1 / (len(u) * left.square()))
    ratio = torch.where(left > 0, ratio, v.shape[1] * right.square())
    return _nearest_power(ratio.sqrt()).to(u.dtype)


def _root_mean_square(matrix: Tensor, dim: int) -> Tensor:
    """Along one dimension, fp64: squares of small factors are beyond fp32."""
    squares = matrix.square().mean(dim).double()
    if matrix.dtype != torch.float64 and not bool(((squares > _SMALLEST) & squares.isfinite()).all()):
        squares = matrix.double().square().mean(dim)
    return squares.sqrt()


def _nearest_power(size: Tensor) -> Tensor:
    """The power of two nearest to each size, 1 where there is none."""
    usable = (size > 0) & size.isfinite()
    return torch.where(usable, size, 1.0).log2().round().exp2()


def whitened_error(delta: Tensor, u: Tensor, v: Tensor, *, gram: Tensor | None = None) -> float:
    """||(delta - u v) L||_F^2 = tr((delta - u v) G (delta - u v)^T) in fp64, without an fp64 copy of the delta.

    Args:
        delta: [out, in].
        u: [out, rank].
        v: [rank, in].
        gram: G [in, in], or None for the plain Frobenius norm.
    """
    total = 0.0
    metric, right = None if gram is None else gram.double(), v.double()
    for start in range(0, len(delta), 512):
        rows = slice(start, start + 512)
        error = delta[rows].double() - u[rows].double() @ right
        total += float(((error if metric is None else error @ metric) * error).sum())
    return total


def refit(delta: Tensor, u: Tensor, *, coarse: bool = False) -> Tensor:
    """The V [k, in] minimising ||delta - u V||_F, for delta [out, in] and u [out, k] of one dtype.

    fp64; or fp32, if it is `coarse`, as it may be where V is rounded to bf16, and the columns of u are nearly
    orthogonal. Then both are rounded to bf16 first, where the processor is faster at that: it costs less than what the
    rounding of V does.
    """
    if not u.shape[1]:
        return delta.new_zeros(0, delta.shape[1], dtype=torch.float64)
    if coarse and u.dtype == torch.float32 and u.device.type == "cpu":
        with bf16_products() if has_fast_bf16() else nullcontext():
            normal = inner_products(u.T, u.T)
            right = u.T @ delta
        factor = _well_conditioned(normal, _COARSE_CONDITION_LIMIT)
        if factor is not None:
            return torch.cholesky_solve(right, factor)
    wide = u.double()
    factor = _well_conditioned(wide.T @ wide, _CONDITION_LIMIT)
    if factor is not None:
        return torch.cholesky_solve((u.T @ delta).double(), factor)
    left, values, right = torch.linalg.svd(wide, full_matrices=False)
    usable = values > values[:1] * (torch.finfo(torch.float64).eps * max(wide.shape))
    inverse = torch.where(usable, 1 / values.clamp_min(_TINY), 0)
    solution: Tensor = right.T @ (inverse[:, None] * (left.T @ delta.double()))
    return solution


def _well_conditioned(normal: Tensor, limit: float) -> Tensor | None:
    """The Cholesky factor of a matrix [k, k], k > 0, if its largest pivot is less than `limit` times the least."""
    factor, failed = torch.linalg.cholesky_ex(normal)
    pivots = factor.diagonal()
    return factor if int(failed) == 0 and bool(pivots.max() < limit * pivots.min()) else None


def _fix_signs(vectors: Tensor) -> Tensor:
    """Make the largest component of every column positive: solvers leave the sign open."""
    if not vectors.numel():
        return vectors
    return vectors * torch.where(-vectors.amin(0) > vectors.amax(0), -1.0, 1.0)
