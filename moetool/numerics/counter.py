"""A counter-based generator: word i of a stream is a function of the stream's key and i, and of nothing else.

What a seed stands for must be the same on every device and in every version of every library, because files rely on it:
a sparse delta stores no indices. So the words come from integer arithmetic modulo 2^64 that is written out here
(splitmix64: Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) and are pinned by
tests. They are always made on the CPU, from where their users move what they derive.
"""

import hashlib
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]

_INCREMENT = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_BLOCK = 1 << 14  # words: a block and its scratch space stay in the cache


def key(seed: int, *path: int | str) -> int:
    """The 64-bit key of an independent stream, e.g. `key(seed, layer, expert, "gate")`.

    The first eight bytes of SHA-256, most significant first, over the decimal seed and the parts of the path, each with
    its type and ended by a zero byte.

    Raises:
        ValueError: a string holds a zero byte.
    """
    digest = hashlib.sha256(f"i{int(seed)}\0".encode())
    for part in path:
        if isinstance(part, str) and "\0" in part:
            raise ValueError("a stream's path cannot hold zero bytes")
        digest.update((f"s{part}\0" if isinstance(part, str) else f"i{int(part)}\0").encode())
    return int.from_bytes(digest.digest()[:8], "big")


def words(key: int, start: int, count: int, out: Words | None = None) -> Words:
    """Words `start` to `start + count` of the stream: [count] little-endian uint64, into `out` if given.

    Word i is mix(key + (i + 1) * 0x9E3779B97F4A7C15), the i-th output of splitmix64 with state `key`.
    """
    result = np.empty(count, dtype="<u8") if out is None else out[:count]
    steps, scratch = _steps(), np.empty(min(count, _BLOCK), dtype=np.uint64)
    for first in range(0, count, _BLOCK):
        block = result[first : first + _BLOCK]
        origin = (key + (start + first) * _INCREMENT) & _MASK
        np.add(steps[: len(block)], np.uint64(origin), out=block)
        _mix(block, scratch[: len(block)])
    return result


def words_at(key: int, counters: NDArray[np.int64]) -> Words:
    """Return the words of the stream at arbitrary positions `counters` [count]: [count] uint64, in the order of
    `counters`."""
    result = (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(_INCREMENT) + np.uint64(key & _MASK)
    _mix(result, np.empty_like(result))
    return result


def below(words: Words, bound: int) -> NDArray[np.int64]:
    """floor(word * bound / 2^64), a number in 0 .. bound - 1 for each word; bound at most 2^31.

    The probabilities of two numbers differ by 2^-64 at most.
    """
    if not 0 < bound <= 1 << 31:
        raise ValueError(f"a bound between 1 and 2^31 is needed, not {bound}")
    half, wide = np.uint64(32), np.uint64(bound)
    carry = ((words & np.uint64(0xFFFFFFFF)) * wide) >> half
    return (((words >> half) * wide + carry) >> half).astype(np.int64)


@cache
def _steps() -> Words:
    """(i + 1) * increment for one block."""
    return np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(_INCREMENT)


def _mix(state: Words, scratch: Words) -> None:
    """The finaliser of splitmix64, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)):
        np.right_shift(state, np.uint64(shift), out=scratch)
        np.bitwise_xor(state, scratch, out=state)
        if factor is not None:
            np.multiply(state, np.uint64(factor), out=state)
