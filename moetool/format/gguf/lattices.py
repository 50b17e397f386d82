"""Bytes of llama.cpp's lattice types (I-quants): of several numbers together, the magnitudes are a point of a list.

Two to three bits a number buy a place in a list of 256 to 1024 points of 4 or 8 magnitudes, and signs. In `iq2_xxs`,
`iq2_xs` and `iq3_xxs` of 8 numbers an even count is negative, which saves a bit. A group of 16 or 32 numbers has a
scale of 4 bits, an odd number from 1 to 31 times the block's fp16 number.

The lists are the library `gguf`'s. Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from moetool.format.gguf.parts import BlockParts

_Bytes = NDArray[np.uint8]


@cache
def lattice_points(name: str) -> _Bytes:
    """The list of a type, `[points, 4 or 8]`: which of the type's magnitudes, counted from the smallest."""
    from moetool.format.gguf.words import gguf_library

    own = getattr(gguf_library().quants, name.upper())
    own.init_grid()
    found: _Bytes = np.searchsorted(own.grid_map, own.grid.reshape(own.grid_shape)).astype(np.uint8)
    return found


@cache
def _places(name: str) -> NDArray[np.int32]:
    """The place in the list of every combination of magnitudes, read as a number; -1 for those not in it."""
    points = lattice_points(name)
    found = np.full((int(points.max()) + 1) ** points.shape[1], -1, np.int32)
    found[_read(points, int(points.max()) + 1)] = np.arange(len(points))
    return found


def _read(points: _Bytes, base: int) -> NDArray[np.int64]:
    powers: NDArray[np.int64] = base ** np.arange(points.shape[-1], dtype=np.int64)
    read: NDArray[np.int64] = points.astype(np.int64) @ powers
    return read


def _taken_apart(name: str, parts: BlockParts) -> tuple[NDArray[np.uint16], _Bytes, _Bytes]:
    """Places in the list `[blocks, 32 or 64]`, signs `[blocks, 32]` of 8 numbers each, and scales of 4 bits."""
    points = lattice_points(name)
    base, dims = int(points.max()) + 1, points.shape[1]
    is_negative = parts.codes < base
    magnitudes = np.where(is_negative, base - 1 - parts.codes, parts.codes - base).astype(np.uint8)
    places = _places(name)[_read(magnitudes.reshape(len(magnitudes), -1, dims), base)]
    assert (places >= 0).all(), "codes are no points of the list"
    signs = np.packbits(is_negative, axis=1, bitorder="little")
    return places.astype(np.uint16), signs, (parts.scales // 2).astype(np.uint8)


def _unit(parts: BlockParts, times: int) -> _Bytes:
    """The bytes of the blocks' numbers, which llama.cpp divides again."""
    return (parts.d * np.float16(times)).astype("<f2").view(np.uint8).reshape(-1, 2)


def _nibbles(scales: _Bytes) -> _Bytes:
    return scales[:, ::2] | scales[:, 1::2] << np.uint8(4)


def _words(signs: _Bytes, scales: _Bytes) -> _Bytes:
    """Of every 32 numbers a word: four times 7 signs, and the scale."""
    seven = (signs & 127).astype("<u4").reshape(len(signs), -1, 4)
    words = seven[..., 0] | seven[..., 1] << 7 | seven[..., 2] << 14 | seven[..., 3] << 21
    return (words | scales.astype("<u4") << 28).astype("<u4").view(np.uint8).reshape(len(signs), -1)


def pack_iq2_xxs(parts: BlockParts) -> _Bytes:
    """Pack the numbers of blocks into the bytes of `iq2_xxs`: `[blocks, 66]`."""
    places, signs, scales = _taken_apart("iq2_xxs", parts)
    low = places.astype(np.uint8).reshape(len(places), -1, 4)
    words = _words(signs, scales).reshape(len(places), -1, 4)
    return np.concatenate([_unit(parts, 8), np.concatenate([low, words], 2).reshape(len(places), -1)], 1)


def pack_iq2_xs(parts: BlockParts) -> _Bytes:
    """Pack the numbers of blocks into the bytes of `iq2_xs`: `[blocks, 74]`."""
    places, signs, scales = _taken_apart("iq2_xs", parts)
    words = (places | (signs & 127).astype(np.uint16) << 9).astype("<u2").view(np.uint8)
    return np.concatenate([_unit(parts, 8), words.reshape(len(places), -1), _nibbles(scales)], 1)


def pack_iq2_s(parts: BlockParts) -> _Bytes:
    """Pack the numbers of blocks into the bytes of `iq2_s`: `[blocks, 82]`."""
    places, signs, scales = _taken_apart("iq2_s", parts)
    two = (places >> 8).astype(np.uint8).reshape(len(places), -1, 4)
    high = two[..., 0] | two[..., 1] << 2 | two[..., 2] << 4 | two[..., 3] << 6
    return np.concatenate([_unit(parts, 8), places.astype(np.uint8), signs, high, _nibbles(scales)], 1)


def pack_iq3_xxs(parts: BlockParts) -> _Bytes:
    """Pack the numbers of blocks into the bytes of `iq3_xxs`: `[blocks, 98]`."""
    places, signs, scales = _taken_apart("iq3_xxs", parts)
    return np.concatenate([_unit(parts, 4), places.astype(np.uint8), _words(signs, scales)], 1)


def pack_iq3_s(parts: BlockParts) -> _Bytes:
    """Pack the numbers of blocks into the bytes of `iq3_s`: `[blocks, 110]`."""
    places, signs, scales = _taken_apart("iq3_s", parts)
    high = np.packbits((places >> 8).astype(np.uint8), axis=1, bitorder="little")
    return np.concatenate([_unit(parts, 1), places.astype(np.uint8), high, signs, _nibbles(scales)], 1)
