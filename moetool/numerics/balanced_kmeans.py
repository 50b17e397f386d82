"""k-means with clusters of exactly equal size, as MoEfication needs it to split neurons into experts.

Lloyd's algorithm with an assignment step under the constraint of equal sizes (Malinen and Fränti, "Balanced K-Means
for Clustering", 2014), which `balanced_assignment` solves exactly, so that the objective never rises.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moetool.numerics.balanced_assignment import balanced_assignment, cluster_size
from moetool.numerics.seeding import generator

_SKETCH = 64  # dimensions in which the first centres are chosen


def balanced_kmeans(rows: Tensor, clusters: int, *, seed: int, iterations: int = 20) -> Tensor:
    """Labels [n] int64 on the CPU, with exactly n/clusters rows of each cluster.

    They locally minimise the sum of squared distances from a row to the mean of its cluster. The same for the same
    arguments on one machine. Memory beside one fp32 copy of the rows: about 24 bytes per row and cluster.

    Args:
        rows: [n, d] in any floating dtype. Distances are computed in fp32, means and the objective in fp64.
        clusters: from 1 to n.
        seed: of the first centres.
        iterations: assignment steps at most; fewer are made when the objective no longer falls.

    Raises:
        ValueError: the clusters do not divide the rows, a number is not finite, or rows or iterations are missing.
    """
    if rows.ndim != 2 or not rows.numel() or iterations < 1:
        raise ValueError(f"cannot cluster rows of shape {list(rows.shape)} in {iterations} iterations")
    size = cluster_size(len(rows), clusters)
    rows = _centred(rows.detach())
    labels, best = torch.arange(len(rows)) // size, -1.0
    if size == 1:
        return labels
    centres = _first_centres(rows, clusters, generator(seed, "balanced k-means"))
    for _ in range(iterations):
        # Prices of the step before are no better to start from, and far worse after the first step.
        found = torch.from_numpy(balanced_assignment(_distances(rows, centres)).labels)
        means = _means(rows, found, clusters)
        # The objective is this much less than the rows' energy, whatever the labels are.
        between = size * float(means.square().sum())
        if between <= best:
            break
        labels, centres, best = found, means, between
    return labels


def _centred(rows: Tensor) -> Tensor:
    """fp32 copy on the CPU, scaled to a largest number of one so that no square overflows, and moved to mean zero."""
    low, high = (float(extreme) for extreme in rows.aminmax())
    largest = max(-low, high)
    if not math.isfinite(largest):
        raise ValueError("rows to cluster must be finite")
    rows = rows.cpu().to(torch.promote_types(rows.dtype, torch.float32))
    rows = (rows / (largest or 1.0)).float()
    rows -= rows.mean(dim=0)
    return rows


def _first_centres(rows: Tensor, clusters: int, stream: torch.Generator) -> Tensor:
    """k-means++ (Arthur and Vassilvitskii, 2007) on a random projection: [clusters, d] fp64."""
    columns = rows.shape[1]
    sketch = rows @ torch.randn(columns, _SKETCH, generator=stream) if columns > _SKETCH else rows
    nearest = torch.ones(len(rows), dtype=torch.float64)
    chosen: list[int] = []
    for draw in torch.rand(clusters, generator=stream, dtype=torch.float64).tolist():
        mass = nearest.cumsum(dim=0)
        chosen.append(min(int(torch.searchsorted(mass, draw * mass[-1], right=True)), len(rows) - 1))
        distance = (sketch - sketch[chosen[-1]]).square().sum(dim=1).double()
        nearest = distance if len(chosen) == 1 else torch.minimum(nearest, distance)
    return rows[chosen].double()


def _distances(rows: Tensor, centres: Tensor) -> NDArray[np.floating]:
    """Squared distances less the row's own energy: [n, clusters] fp32."""
    low = centres.float()
    return torch.addmm(low.square().sum(dim=1), rows, low.T, alpha=-2).numpy()


def _means(rows: Tensor, labels: Tensor, clusters: int) -> Tensor:
    """[clusters, d] fp64."""
    members = labels.argsort(stable=True).view(clusters, -1)
    return torch.stack([rows[own].double().mean(dim=0) for own in members])
