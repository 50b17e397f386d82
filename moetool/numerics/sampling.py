"""A uniformly random index set that a key stands for, so that a sparse matrix stores its values only.

The set has exactly k of n elements and every such set is equally likely (simple random sampling without replacement).
Against independent coin flips (DeRS, arXiv:2503.01359, Eq. 4) the bytes are known before anything ran, and the closed
forms stay: an element is kept with probability k/n exactly, so kept values times n/k are unbiased, with variance
v^2 (n - k)/k = v^2 p/(1 - p) for p = 1 - k/n. Two elements of a matrix get a correlation of -1/(n - 1), nothing else.

How: a Bernoulli process of rate k/n is walked by its gaps, one draw per kept element instead of one per element. Given
their number, the elements it keeps are a uniformly random set; a few (about sqrt(k) of k) uniformly random ones are
then removed or added. All of it is integer arithmetic, in any block size.
"""

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moetool.numerics.counter import below, key, words, words_at

Indices = NDArray[np.int32]

_LARGEST = 1 << 30  # a block of draws may run beyond the last element
_LONGEST = (1 << 15) - 1  # a longer gap is walked in several draws: a geometric distribution has no memory
_BLOCK = 1 << 14  # words, of four draws each
_CHUNK = 1 << 17  # indices scattered at a time


class _Gaps(NamedTuple):
    """The geometric distribution of rate k/n.

    `bounds[g - 1]` is floor(2^64 P(gap <= g)) for g up to the longest. `table[u]` is the gap of every 64-bit number
    whose upper 16 bits are u, or 0 where they leave it open.
    """

    table: NDArray[np.uint16]
    bounds: NDArray[np.uint64]


def sample(n: int, k: int, seed_key: int) -> Indices:
    """Draw k of the numbers 0 .. n - 1, ascending: [k] int32. The key determines them for ever.

    Probabilities are exact to about 2^-64 per draw. Costs about 1 ns per kept element.

    Raises:
        ValueError: not 0 <= k <= n <= 2^30.
    """
    if not 0 <= k <= n <= _LARGEST:
        raise ValueError(f"cannot choose {k} of {n} elements; at most {_LARGEST} are supported")
    if k in (0, n):
        return np.arange(k, dtype=np.int32)
    buffer, found = _bernoulli(n, k, seed_key)
    if found > k:
        return _without(buffer[:found], _distinct(key(seed_key, "remove"), found, found - k, buffer[:0]))
    return _with(buffer, found, _distinct(key(seed_key, "add"), n, k - found, buffer[:found]))


def scatter(values: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    """Set `out` [n] to zero but for `values` [k] of its dtype at `indices` [k] int32, ascending. No gradients."""
    if out.device.type != "cpu":
        return out.zero_().index_copy_(0, indices.long(), values)
    wide = torch.empty(min(len(indices), _CHUNK), dtype=torch.int64)
    cleared = 0
    for start in range(0, len(indices), _CHUNK):
        part = slice(start, start + _CHUNK)
        chunk = wide[: len(indices[part])].copy_(indices[part])
        last = int(chunk[-1]) + 1
        out[cleared:last].zero_()  # just before it is written to, while it is in the cache
        out.index_copy_(0, chunk, values[part])
        cleared = last
    out[cleared:].zero_()
    return out


def _bernoulli(n: int, k: int, seed_key: int) -> tuple[Indices, int]:
    """Every number below n with probability k/n, independently: they are the first of a buffer, ascending; how many."""
    gaps = _geometric(n, k)
    streams = key(seed_key, "gaps"), key(seed_key, "fine")
    rate = k / n  # decides how many draws are made at a time, not what they are
    advance = -math.expm1(len(gaps.bounds) * math.log1p(-rate)) / rate
    buffer = np.empty(k + math.ceil(6 * math.sqrt(k)) + 16 + 4 * _BLOCK, dtype=np.int32)
    start, last, found = 0, -1, 0
    while last < n - 1:
        expected = (n - 1 - last) / advance
        count = min(4 * _BLOCK, 4 * math.ceil((expected + 4 * math.sqrt(expected) + 16) / 4))
        if found + count > len(buffer):
            buffer = np.concatenate([buffer, np.empty_like(buffer)])
        steps, ends = _draw(gaps, streams, start, count)
        positions = buffer[found : found + count]
        np.cumsum(steps, dtype=np.int32, out=positions)
        positions += last
        start, last = start + count, int(positions[-1])
        if ends is not None:
            kept = positions[ends]
            buffer[found : found + len(kept)] = kept
            count = len(kept)
        found += count
    return buffer, int(np.searchsorted(buffer[:found], np.int32(n)))  # another dtype would convert the buffer


def _draw(
    gaps: _Gaps, streams: tuple[int, int], start: int, count: int
) -> tuple[NDArray[np.uint16], NDArray[np.bool_] | None]:
    """Draws `start` to `start + count`, multiples of four: how far each goes, and whether it ends at a kept element.

    None for the latter if all do. Draw i takes its upper 16 bits from quarter i of the first stream and, where they do
    not decide, the other 48 from word i of the second.
    """
    upper = words(streams[0], start // 4, count // 4).view("<u2")
    steps = np.empty(count, dtype=np.uint16)
    np.take(gaps.table, upper, out=steps, mode="wrap")  # 16 bits cannot leave the table; "wrap" is the fastest mode
    undecided = np.flatnonzero(steps == 0)
    if not len(undecided):
        return steps, None
    lower = words_at(streams[1], undecided + start) >> np.uint64(16)
    number = (upper[undecided].astype(np.uint64) << np.uint64(48)) | lower
    gap = np.searchsorted(gaps.bounds, number, side="right") + 1
    steps[undecided] = np.minimum(gap, len(gaps.bounds))
    longer = undecided[gap > len(gaps.bounds)]
    if not len(longer):
        return steps, None
    ends = np.ones(count, dtype=np.bool_)
    ends[longer] = False
    return steps, ends


@lru_cache(maxsize=16)
def _geometric(n: int, k: int) -> _Gaps:
    """Tables for the rate k/n, 0 < k < n, computed in whole numbers of 128 bits."""
    longest = min(_LONGEST, 45 * n // k + 1)  # beyond 45 n/k less than 2^-64 is left
    bounds = []
    survival = 1 << 128
    for _ in range(longest):
        survival = survival * (n - k) // n
        bounds.append(min(((1 << 128) - survival) >> 64, (1 << 64) - 1))
    edges = np.array(bounds, dtype=np.uint64)
    first = np.arange(1 << 16, dtype=np.uint64) << np.uint64(48)
    low = np.searchsorted(edges, first, side="right")
    high = np.searchsorted(edges, first | np.uint64((1 << 48) - 1), side="right")
    return _Gaps(np.where((low == high) & (low < longest), low + 1, 0).astype(np.uint16), edges)


def _distinct(stream: int, bound: int, count: int, taken: Indices) -> Indices:
    """The first `count` different numbers below `bound` of a stream that are not among `taken`, ascending both."""
    batch = 2 * count + 16
    while True:
        unique, first = np.unique(below(words(stream, 0, batch), bound).astype(np.int32), return_index=True)
        if len(taken):
            free = taken[np.minimum(np.searchsorted(taken, unique), len(taken) - 1)] != unique
            unique, first = unique[free], first[free]
        if len(unique) >= count:
            return np.sort(unique[np.argsort(first)[:count]])
        batch *= 2


def _without(found: Indices, ranks: Indices) -> Indices:
    """Leave out the elements at `ranks`, in place: what lies between two of them moves as a whole."""
    cuts = [*ranks.tolist(), len(found)]
    for shift, (rank, following) in enumerate(itertools.pairwise(cuts)):
        found[rank - shift : following - shift - 1] = found[rank + 1 : following]
    return found[: len(found) - len(ranks)]


def _with(buffer: Indices, found: int, added: Indices) -> Indices:
    """Merge `added` into the first `found` of a buffer, in place from the back."""
    if found + len(added) > len(buffer):
        buffer = np.concatenate([buffer, np.empty_like(added)])
    end = found
    ranks = np.searchsorted(buffer[:found], added).tolist()
    for shift, number, rank in zip(range(len(added), 0, -1), added.tolist()[::-1], ranks[::-1], strict=True):
        buffer[rank + shift : end + shift] = buffer[rank:end]
        buffer[rank + shift - 1] = number
        end = rank
    return buffer[: found + len(added)]
