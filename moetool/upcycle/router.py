"""Initial weights of routers: rows that are neither so large that routing is one-hot, nor equal, nor blind to some
tokens."""

import torch
from torch import Tensor

from moetool.numerics.seeding import generator, uniform


def random_router(experts: int, hidden: int, std: float, seed: int, layer: int) -> Tensor:
    """Rows `[experts, hidden]` fp32 of a fresh router for one layer."""
    return uniform((experts, hidden), std, generator(seed, "router", layer))


def centred(rows: Tensor, mean: Tensor) -> Tensor:
    """Rows without their part along the mean input `[hidden]`.

    Inputs of a layer share a large constant part. Along it, a row gives every token the same head start or handicap,
    and an expert can begin its life without a single token.
    """
    direction = mean.double() / mean.double().norm().clamp_min(1e-30)
    return (rows.double() - torch.outer(rows.double() @ direction, direction)).to(rows.dtype)


def decorrelated(rows: Tensor, covariance: Tensor) -> Tensor:
    """Mix router rows as little as possible so that the experts' logits have equal variance and no correlation, on
    inputs of that covariance `[hidden, hidden]`.

    An expert whose logits vary more than others', or with another's, gets more or fewer tokens than its share. The mix
    is Löwdin's symmetric one, `G^(-1/2) rows` with `G = rows C rowsᵀ`; the mean variance stays. Where there are so many
    experts that their rows cannot be independent, only the variances are made equal.
    """
    wide = rows.double()
    products = wide @ covariance @ wide.T
    if 2 * len(rows) <= rows.shape[1]:
        values, vectors = torch.linalg.eigh(products)
        values = values.clamp_min(1e-9 * values[-1])
        mix = vectors @ torch.diag(values.rsqrt()) @ vectors.T * values.mean().sqrt()
    else:
        variances = products.diagonal().clamp_min(1e-30)
        mix = torch.diag((variances.mean() / variances).sqrt())
    return (mix @ wide).to(rows.dtype)


def centroid_router(centroids: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """A router whose row for each expert points from the mean input to that of the expert's own text.

    Args:
        centroids: `[experts, hidden]` fp64, mean input of the layer on each expert's text.
        mean: `[hidden]` fp64, mean over all of it.
        covariance: `[hidden, hidden]` fp64, of the layer's inputs.

    Returns:
        Rows `[experts, hidden]` fp32, free of the common part, scaled so that the logits of all experts together vary
        with standard deviation 1: routing prefers, and is not one-hot.
    """
    rows = centred(centroids - centroids.mean(0), mean)
    deviation = ((rows @ covariance) * rows).sum(1).mean().clamp_min(0).sqrt()
    return (rows / deviation.clamp_min(1e-30)).float()
