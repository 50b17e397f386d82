"""The cheapest assignment of points to clusters of exactly equal size.

This is the transportation problem with equal demands. The usual way copies every cluster's column points/clusters
times and solves an assignment problem of [points, points] (Hungarian algorithm). Here nothing is larger than the cost:

1. A price per cluster. Points go where cost plus price is lowest, and prices follow the load: subgradient ascent of the
   Lagrangian dual. It ends nearly balanced, and optimal for the loads that it has.
2. Successive shortest paths (Ahuja, Magnanti, Orlin, *Network Flows*, 1993, section 9.7) on a graph with one node per
   cluster, where arc p -> q is as long as its cheapest move of a point from p to q. Each path takes points from an
   overfull cluster to one that is not full; prices change so that optimality stays. When the loads are equal, it is the
   optimum that the Hungarian algorithm finds.
"""

import itertools
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from moetool.numerics.arrays import Floats, Integers

_SWEEPS = 60  # at most; each looks at the whole cost matrix
_PATIENCE = 6  # sweeps without improvement
_ENOUGH = 0.001  # of the points misplaced: a path costs less than a sweep then
_SAMPLE = 512  # points that the first prices and step lengths are estimated from

FloatT = TypeVar("FloatT", np.float32, np.float64)


class Assignment(NamedTuple):
    """`labels` [points], and `prices` [clusters] in units of the cost that prove them optimal.

    No point has a lower cost plus price in another cluster than in its own, but for rounding. So for any balanced
    labels, total cost >= sum_i min_k (cost_ik + price_k) - points / clusters * sum_k price_k, with equality for these.
    """

    labels: Integers
    prices: Floats


def balanced_assignment(cost: NDArray[np.floating]) -> Assignment:
    """Labels with exactly points/clusters points in every cluster and the lowest total cost. Deterministic.

    Args:
        cost: [points, clusters] fp32 or fp64, any finite numbers.

    Raises:
        ValueError: the clusters do not divide the points, there are none, or a number is not finite.
    """
    points, clusters = cost.shape
    size = cluster_size(points, clusters)
    largest = max(float(cost.max()), -float(cost.min()))
    if not np.isfinite(largest):
        raise ValueError("costs must be finite")
    unit = 2.0 ** float(np.clip(np.frexp(largest)[1], -1000, 1000))  # a power of two: nothing is rounded
    scaled = cost * np.float64(1 / unit)
    scaled -= scaled.min(axis=1, keepdims=True)
    # Where many points are alike (rows near zero), equal prices would send all of them to the same cluster.
    prices = _ascend(scaled, -np.median(_sample(scaled), axis=0), size)
    labels = (scaled + prices).argmin(axis=1)
    prices = _balance(scaled, labels, prices, size)
    return Assignment(labels, prices * unit)


def cluster_size(points: int, clusters: int) -> int:
    """Points in each of equal clusters.

    Raises:
        ValueError: the clusters do not divide the points, or there are none.
    """
    if clusters < 1 or points < 1 or points % clusters:
        raise ValueError(f"{points} points cannot be split into {clusters} clusters of equal size")
    return points // clusters


def _sample(cost: NDArray[FloatT]) -> NDArray[FloatT]:
    return cost[:: -(-len(cost) // _SAMPLE)]


def _ascend(cost: Floats, prices: Floats, size: int) -> Floats:
    """Prices [clusters] at which the clusters' loads are nearly equal.

    Each cluster has its own step, which grows while its surplus keeps its sign and is halved when that flips, as in
    Rprop (Riedmiller and Braun, 1993).
    """
    points, clusters = cost.shape
    if clusters == 1:
        return prices
    low = cost.astype(np.float32)
    nearest = np.partition(_sample(low), 1, axis=1)
    steps = np.full(clusters, float((nearest[:, 1] - nearest[:, 0]).mean()))
    total = np.empty_like(low)
    last, best, fewest, waited = np.zeros(clusters, dtype=np.int64), prices, points, 0
    for _ in range(_SWEEPS):
        np.add(low, prices.astype(np.float32), out=total)
        surplus = np.bincount(total.argmin(axis=1), minlength=clusters) - size
        misplaced = int(surplus.clip(0).sum())
        waited += 1
        if misplaced < fewest:
            best, fewest, waited = prices, misplaced, 0
        if waited == _PATIENCE or misplaced <= _ENOUGH * points:
            break
        steps *= np.choose((np.sign(last * surplus) + 1).astype(int), (0.5, 1.0, 1.2))
        prices = prices + steps * (surplus / size).clip(-1, 1)
        last = surplus
    return best


def _balance(cost: Floats, labels: Integers, prices: Floats, size: int) -> Floats:
    """Make labels [points] balanced, in place; they must be optimal at the prices, and are so at those returned."""
    clusters = cost.shape[1]
    load = np.bincount(labels, minlength=clusters)
    moves = np.stack([_cheapest_moves(cost, labels, cluster) for cluster in range(clusters)])
    while (load > size).any():
        lengths = np.maximum(moves + prices - prices[:, None], 0)
        distance, parent = _shortest_paths(lengths, load > size)
        prices = prices - distance
        used: set[int] = set()  # roots: paths from different ones have no cluster in common
        for sink in np.argsort(distance, kind="stable"):
            if load[sink] >= size:
                continue
            path = _path(parent, int(sink))
            root = path[0]
            if root in used:
                continue
            used.add(root)
            arcs = list(itertools.pairwise(path))
            equal = [_points_at(cost, labels, moves, p, q) for p, q in arcs]
            count = min(load[root] - size, size - load[sink], *map(len, equal))
            for (_, q), candidates in zip(arcs, equal, strict=True):
                labels[candidates[:count]] = q
            load[root] -= count
            load[sink] += count
            for cluster in path:
                moves[cluster] = _cheapest_moves(cost, labels, cluster)
    return prices


def _cheapest_moves(cost: Floats, labels: Integers, cluster: int) -> Floats:
    """What it costs at least to move one of the cluster's points to each other one: [clusters], infinite if none."""
    own = cost[labels == cluster]
    own -= own[:, cluster, None]
    return own.min(axis=0, initial=np.inf)


def _points_at(cost: Floats, labels: Integers, moves: Floats, source: int, target: int) -> Integers:
    """Points of `source` whose move to `target` is the cheapest; duplicates are as cheap."""
    own = np.flatnonzero(labels == source)
    return own[cost[own, target] - cost[own, source] == moves[source, target]]


def _shortest_paths(lengths: Floats, sources: NDArray[np.bool_]) -> tuple[Floats, Integers]:
    """Bellman-Ford from all sources at once, for lengths [nodes, nodes] >= 0: distances and parents (-1 for sources).

    The parents make trees in floating point too: a rounded sum of non-negative numbers is no less than either.
    """
    distance = np.where(sources, 0.0, np.inf)
    parent = np.full(len(distance), -1)
    changed = np.flatnonzero(sources)
    while len(changed):
        through = distance[changed, None] + lengths[changed]
        shortest = through.min(axis=0)
        better = np.flatnonzero(shortest < distance)
        parent[better] = changed[through[:, better].argmin(axis=0)]
        distance[better] = shortest[better]
        changed = better
    return distance, parent


def _path(parent: Integers, sink: int) -> list[int]:
    """Nodes from the root of the sink's tree to the sink."""
    path = [sink]
    while parent[path[-1]] >= 0:
        path.append(int(parent[path[-1]]))
    return path[::-1]
