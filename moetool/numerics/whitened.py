"""The leading singular directions of a whitened delta, from the smaller of its two squares.

Left: P are eigenvectors of delta G delta^T. Right: with L L^T = G, L^T (delta^T delta) L = V S^2 V^T and Y = L V / S,
for which delta Y = P. Each is tried in fp32 where eigenvalues as
small as those asked for, by their share `fp32` of the largest, are to be had from it; not at all for None.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moetool.numerics.congruence import congruence, inner_products, outlier_channels, split_congruence
from moetool.numerics.deflation import deflated_top_eigh
from moetool.numerics.eigen import top_eigh
from moetool.numerics.root import square_root

# Squared singular values below this share of the largest are rounding noise of an fp64 eigen-decomposition.
_NOISE = 1e-13
_TINY = torch.finfo(torch.float64).tiny


class Directions(NamedTuple):
    """values [k] fp64, descending, >= 0; basis [out or in, k] fp64, signs open; energy: sum of all the values."""

    values: Tensor
    basis: Tensor
    energy: float


def left_directions(delta: Tensor, gram: Tensor | None, k: int, fp32: float | None) -> Directions:
    """The first k P of delta [out, in] fp32 whitened by gram [in, in] or not at all; basis [out, k]."""
    if fp32 is not None:
        product, scale = _small_product(delta, gram)
        found = _try_fp32(product, k, scale, fp32)
        if found is not None:
            return _directions(product, *found)
    wide = delta.double()
    return directions_of(inner_products(wide, wide) if gram is None else congruence(wide, gram), k, None)


def directions_of(product: Tensor, k: int, fp32: float | None) -> Directions:
    """The first k P from delta G delta^T [out, out] itself, fp64."""
    found = None if fp32 is None else _try_fp32(product, k, 0.0, fp32)
    return _directions(product, *(top_eigh(product, k) if found is None else found))


def right_directions(delta: Tensor, gram: Tensor | None, k: int, fp32: float | None) -> Directions:
    """The first k Y of delta [out, in] fp32 whitened by gram [in, in] or not at all; basis [in, k]."""
    root = None if gram is None else square_root(gram.double())  # [in, in]
    found = None
    if fp32 is not None:
        inner = inner_products(delta.T, delta.T)  # [in, in] fp32
        if root is None or gram is None:
            product = inner.double()
            scale = float(torch.linalg.vector_norm(product))
        else:
            # fp32 is enough for delta^T delta: its error is relative to the delta's own conditioning, whatever L is.
            product, scale = split_congruence(root.T, inner, _outliers(delta, gram))
        found = _try_fp32(product, k, scale, fp32)
    if found is None:
        wide = delta.T.double()
        inner = inner_products(wide, wide)
        product = inner if root is None else congruence(root.T, inner)
        found = top_eigh(product, k)
    values, vectors, energy = _directions(product, *found)
    seen = int((values > _NOISE * values[:1].clamp_min(_TINY)).sum())
    basis = vectors[:, :seen] / values[:seen].sqrt()
    if root is not None:
        basis = root @ basis
    if seen < k:
        basis = _complete(basis, inner.double(), k)
    return Directions(values, basis, energy)


def _directions(product: Tensor, values: Tensor, vectors: Tensor) -> Directions:
    return Directions(values.clamp_min(0), vectors, float(product.diagonal().sum().clamp_min(0)))


def _small_product(delta: Tensor, gram: Tensor | None) -> tuple[Tensor, float]:
    """delta G delta^T through fp32 with fp64 outliers, and the norm of the fp32 part."""
    if gram is None:
        product = inner_products(delta, delta).double()
        return product, float(torch.linalg.vector_norm(product))
    return split_congruence(delta, gram, _outliers(delta, gram))


def _outliers(delta: Tensor, gram: Tensor) -> Tensor:
    """Input channels that dominate the whitened delta: [o] indices."""
    return outlier_channels(delta.square().sum(0).double() * gram.diagonal())


def _try_fp32(product: Tensor, k: int, scale: float, resolution: float) -> tuple[Tensor, Tensor] | None:
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
