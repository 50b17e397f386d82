"""The leading singular directions of a whitened delta, from the smaller of its two squares.

Left: P are eigenvectors of delta G delta^T. Right: with L L^T = G and A = delta L, A^T A = V S^2 V^T and P = A V / S.
Each is tried in fp32 where eigenvalues as small as those asked for, by their share of the largest, are to be had from
it. From the right, rounding A is a small error of the delta; rounding its square would drown small eigenvalues.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from moetool.numerics.congruence import (
    congruence,
    inner_products,
    outlier_channels,
    split_congruence,
    symmetric_blocks,
)
from moetool.numerics.deflation import FP32_RESOLUTION, deflated_eigenvalues, deflated_top_eigh
from moetool.numerics.eigen import top_eigh
from moetool.numerics.precision import bf16_products, has_fast_bf16
from moetool.numerics.root import square_root

# Squared singular values below this share of the largest are rounding noise of an fp64 eigen-decomposition.
_NOISE = 1e-13
_TINY = torch.finfo(torch.float64).tiny
# Energy of the errors of numbers rounded to bf16, by their own, and what of a truncation's loss it may be.
_BF16_ROUNDING = 2.0**-18
_ROUNDING_LIMIT = 1e-3
_COARSE_RESOLUTION = 1e-7


class Directions(NamedTuple):
    """values [k] fp64, descending, >= 0; basis [out or in, k], signs open; energy: sum of all the values; whether the
    basis holds P [out, k], or Y [in, k] with delta Y = P."""

    values: Tensor
    basis: Tensor
    energy: float
    is_left: bool = True


class Image:
    """A = delta L of a delta [out, in] fp32, without the input channels that dominate it, beside which all others would
    lose their digits; those are kept as two thin factors in fp64.

    Args:
        delta: [out, in] fp32.
        root: L [in, in] fp64, or None for the identity.
        coarse: products of bf16 numbers, where the processor is faster at those.
    """

    def __init__(self, delta: Tensor, root: Tensor | None, *, coarse: bool) -> None:
        self._coarse = coarse and delta.device.type == "cpu" and has_fast_bf16()
        self._few, self._few_root, self._ordinary = delta[:, :0], delta.new_zeros(0, delta.shape[1]), delta
        if root is not None:
            outliers = outlier_channels(delta.square().sum(0).double() * root.square().sum(1))
            self._few, self._few_root = delta[:, outliers], root[outliers]
            narrow, lower = root.float(), not bool(root.triu(1).any())
            narrow[outliers] = 0
            self._ordinary = torch.empty_like(delta)
            with self._products():
                for start, stop in symmetric_blocks(len(root)):
                    seen = slice(start if lower else 0, None)
                    torch.mm(delta[:, seen], narrow[seen, start:stop], out=self._ordinary[:, start:stop])
        if self._coarse:  # what is multiplied from now on is multiplied exactly
            self._ordinary = self._ordinary.bfloat16().float()

    def square(self) -> tuple[Tensor, float, float]:
        """A^T A [in, in] fp64; the norm of its part from fp32 products; the energy of the errors of rounding A."""
        transposed = self._ordinary.T
        with self._products():
            low = inner_products(transposed, transposed)
        scale = float(torch.linalg.vector_norm(low))
        out = low.double()
        rounding = _BF16_ROUNDING * float(out.diagonal().sum()) if self._coarse else 0.0
        if self._few.shape[1]:
            few = self._few.double()
            half = (self._few.T @ self._ordinary).double() + 0.5 * (few.T @ few) @ self._few_root
            cross = self._few_root.T @ half
            out += cross
            out += cross.T
        return out, scale, rounding

    def of(self, vectors: Tensor) -> Tensor:
        """Multiply A `[out, in]` by vectors V `[in, k]` fp64: A V `[out, k]` fp32."""
        with self._products():
            image = self._ordinary @ vectors.float()
        if self._few.shape[1]:
            image += self._few @ (self._few_root @ vectors).float()
        return image

    def _products(self) -> AbstractContextManager[None]:
        return bf16_products() if self._coarse else nullcontext()


def left_directions(delta: Tensor, gram: Tensor | None, k: int, *, fp32: bool, coarse: bool) -> Directions:
    """The first k P of delta [out, in] fp32 whitened by gram [in, in] or not at all."""
    if fp32:
        product, scale = _small_product(delta, gram)
        found = _try_fp32(product, k, scale, coarse=coarse)
        if found is not None:
            return _directions(product, *found)
    wide = delta.double()
    product = inner_products(wide, wide) if gram is None else congruence(wide, gram)
    return directions_of(product, k, fp32=False, coarse=coarse)


def directions_of(product: Tensor, k: int, *, fp32: bool, coarse: bool) -> Directions:
    """The first k columns of P, fp64, from delta G delta^T [out, out] itself."""
    found = _try_fp32(product, k, 0.0, coarse=coarse) if fp32 else None
    return _directions(product, *(top_eigh(product, k) if found is None else found))


def right_directions(
    delta: Tensor, gram: Tensor | None, root: Tensor | None, k: int, *, fp32: bool, coarse: bool
) -> Directions:
    """The first k directions of delta [out, in] fp32 whitened by gram [in, in] or not at all.

    `root` is a square root of the gram, if there is one already.
    """
    if root is None and gram is not None:
        root = square_root(gram.double())  # [in, in]
    for rounded in (True, False) if coarse and has_fast_bf16() else (False,):
        found = _from_image(delta, root, k, coarse=rounded, resolution=_resolution(coarse)) if fp32 else None
        if found is not None:
            return found
    wide = delta.T.double()
    inner = inner_products(wide, wide)
    product = inner if root is None else congruence(root.T, inner)
    values, vectors, energy, _ = _directions(product, *top_eigh(product, k))
    seen = int((values > _NOISE * values[:1].clamp_min(_TINY)).sum())
    basis = vectors[:, :seen] / values[:seen].sqrt()
    if root is not None:
        basis = root @ basis
    if seen < k:
        basis = _complete(basis, inner, k)
    return Directions(values, basis, energy, is_left=False)


def _from_image(delta: Tensor, root: Tensor | None, k: int, *, coarse: bool, resolution: float) -> Directions | None:
    """The first k P, if fp32 resolves them and rounding A costs next to nothing of what they leave."""
    image = Image(delta, root, coarse=coarse)
    product, scale, rounding = image.square()
    found = resolved(product, k, scale, resolution)
    if found is None:
        return None
    values, vectors, energy, _ = _directions(product, *found)
    if coarse and k < len(product) and rounding > _ROUNDING_LIMIT * (energy - float(values.sum())):
        return None
    return Directions(values, image.of(vectors / values.sqrt()), energy)


def spectrum_of(product: Tensor, *, fp32: bool) -> Tensor:
    """All eigenvalues [n] of a square [n, n] fp64 of a whitened delta, descending, >= 0."""
    values = deflated_eigenvalues(product) if fp32 else torch.linalg.eigvalsh(product).flip(0)
    return values.clamp_min(0)


def small_square(delta: Tensor, gram: Tensor | None, root: Tensor | None, *, fp32: bool) -> Tensor:
    """The smaller of a whitened delta's two squares, fp64; with `fp32` as coarse as eigenvalues bear."""
    rows, columns = delta.shape
    if rows > columns and root is None and gram is not None:
        root = square_root(gram.double())
    if fp32:
        return Image(delta, root, coarse=True).square()[0] if rows > columns else _small_product(delta, gram)[0]
    wide = delta.double()
    if rows > columns:
        inner = inner_products(wide.T, wide.T)
        return inner if root is None else congruence(root.T, inner)
    return inner_products(wide, wide) if gram is None else congruence(wide, gram)


def _directions(product: Tensor, values: Tensor, vectors: Tensor) -> Directions:
    return Directions(values.clamp_min(0), vectors, float(product.diagonal().sum().clamp_min(0)))


def _small_product(delta: Tensor, gram: Tensor | None) -> tuple[Tensor, float]:
    """delta G delta^T through fp32 with fp64 outliers, and the norm of the fp32 part."""
    if gram is None:
        product = inner_products(delta, delta).double()
        return product, float(torch.linalg.vector_norm(product))
    outliers = outlier_channels(delta.square().sum(0).double() * gram.diagonal())
    return split_congruence(delta, gram, outliers)


def _resolution(coarse: bool) -> float:
    return _COARSE_RESOLUTION if coarse else FP32_RESOLUTION


def _try_fp32(product: Tensor, k: int, scale: float, *, coarse: bool) -> tuple[Tensor, Tensor] | None:
    return resolved(product, k, scale, _resolution(coarse))


def resolved(product: Tensor, k: int, scale: float, resolution: float) -> tuple[Tensor, Tensor] | None:
    """Leading eigenpairs if fp32 resolves them, `scale` being the norm of what already went through fp32."""
    if k == 0 or not math.isfinite(scale):
        return None
    found = deflated_top_eigh(product, k, resolution)
    if found is None or not bool(found[0].min() >= resolution * scale):
        return None
    return found


def _complete(basis: Tensor, inner: Tensor, k: int) -> Tensor:
    """Extend Y [in, seen] to k columns by the plain SVD of what it leaves of the delta; inner = delta^T delta.

    The activations say nothing about these directions. Zero columns follow once the delta is exhausted.
    """
    image = inner @ basis
    values, vectors = top_eigh(inner - image @ image.T, k - basis.shape[1])
    vectors = vectors - basis @ (image.T @ vectors)
    exists = values > _NOISE * inner.diagonal().sum()
    scaled = torch.where(exists, vectors / values.clamp_min(_TINY).sqrt(), 0)
    return torch.cat([basis, scaled], dim=1)
