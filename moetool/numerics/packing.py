"""Codes of one to eight bits, packed into bytes without gaps.

Planar: the codes are cut in as many stripes as a byte holds codes, and byte i holds the i-th code of every stripe, the
first stripe in the lowest bits. So whole stripes are shifted at once, which plain torch does at the speed of memory on
any device; neighbours in one byte would be several times slower. Widths that do not divide a byte are split into planes
that do, the lowest bits first: 3 bits are a plane of 2 and then a plane of 1.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_BLOCK = 1 << 19  # bytes packed at a time, so that they are in the cache when the next stripe comes


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits: count * bits / 8, rounded up in each plane.

    Raises:
        ValueError: not 1 <= bits <= 8.
    """
    return sum(_plane_size(count, width) for _, width in _planes(bits))


def pack(codes: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Pack `codes` [count] uint8, all below 2^bits, into [packed_size(count, bits)] uint8.

    Args:
        codes: contiguous; higher bits must be zero, which is not checked.
        bits: 1 to 8.
        out: where to, if given.

    Raises:
        ValueError: another dtype or shape, or not 1 <= bits <= 8.
    """
    count = codes.numel()
    size = packed_size(count, bits)
    out = torch.empty(size, dtype=torch.uint8, device=codes.device) if out is None else out
    _check(codes, (count,), "codes")
    _check(out, (size,), "packed bytes")
    if bits == 8:
        return out.copy_(codes)
    for plane, low, width in _split(out, bits, count):
        _pack_plane(codes, low, width, bits, plane)
    return out


def unpack(packed: Tensor, bits: int, count: int, out: Tensor | None = None) -> Tensor:
    """Inverse of `pack`: the first `count` codes, [count] uint8.

    Raises:
        ValueError: another dtype or length than `count` codes have, or not 1 <= bits <= 8.
    """
    _check(packed, (packed_size(count, bits),), "packed bytes")
    out = torch.empty(count, dtype=torch.uint8, device=packed.device) if out is None else out
    _check(out, (count,), "codes")
    if bits == 8:
        return out.copy_(packed)
    for plane, low, width in _split(packed, bits, count):
        _unpack_plane(plane, low, width, out)
    return out


def rows_served(bits: int) -> int:
    """Number of rows of a matrix that share a byte of packed codes, in the plane where these are most: where rows are a
    multiple of it, a byte has whole rows' codes of one column.

    Raises:
        ValueError: not 1 <= bits <= 8.
    """
    return max(8 // width for _, width in _planes(bits))


def unpack_rows(packed: Tensor, bits: int, shape: tuple[int, int], rows: Tensor) -> Tensor:
    """Codes `[n, columns]` uint8 of the `rows` `[n]` int64 of a matrix of that `shape`, whose rows are a multiple of
    `rows_served(bits)`."""
    lines = packed.view(-1, shape[1])
    if bits == 8:
        return lines.index_select(0, rows)
    found = torch.zeros(len(rows), shape[1], dtype=torch.uint8, device=packed.device)
    for first, length, low, width in _lines(bits, shape[0]):
        shift = (rows // length * width).to(torch.uint8).unsqueeze(1)
        found |= (lines.index_select(0, first + rows % length) >> shift & (1 << width) - 1) << low
    return found


def unpack_span(read: Callable[[int, int], Tensor], bits: int, shape: tuple[int, int], start: int, stop: int) -> Tensor:
    """Codes `[stop - start, columns]` uint8 of consecutive rows of a matrix, whose rows are a multiple of
    `rows_served(bits)`.

    Args:
        read: returns so many packed bytes, from a byte on.
        bits: 1 to 8.
        shape: of the matrix, `[rows, columns]`.
        start: first row.
        stop: row after the last.
    """
    columns, count = shape[1], stop - start
    if bits == 8:
        return read(start * columns, count * columns).view(count, columns)
    found = torch.zeros(count, columns, dtype=torch.uint8)
    for first, length, low, width in _lines(bits, shape[0]):
        for stripe in range(start // length, -(-stop // length)):
            own = range(max(start, stripe * length), min(stop, (stripe + 1) * length))
            begin = first + own.start - stripe * length
            part = read(begin * columns, len(own) * columns).view(len(own), columns)
            found[own.start - start : own.stop - start] |= (part >> stripe * width & (1 << width) - 1) << low
    return found


def _lines(bits: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Of every plane of a matrix with so many rows, in rows of bytes: where it begins and how long it is; the lowest
    bit of a code that it holds, and how many."""
    first = 0
    for low, width in _planes(bits):
        length = rows * width // 8
        yield first, length, low, width
        first += length


def _split(packed: Tensor, bits: int, count: int) -> Iterator[tuple[Tensor, int, int]]:
    """The bytes of every plane, the lowest bit of a code that it holds, and how many."""
    start = 0
    for low, width in _planes(bits):
        stop = start + _plane_size(count, width)
        yield packed[start:stop], low, width
        start = stop


def _planes(bits: int) -> Iterator[tuple[int, int]]:
    """Lowest bit and width of every plane: the powers of two that `bits` is the sum of, the largest first."""
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
    low = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            yield low, width
            low += width


def _plane_size(count: int, width: int) -> int:
    """Bytes of one plane, which is also the length of its stripes."""
    return -(-count * width // 8)


def _stripes(codes: Tensor, width: int, length: int, first: int) -> Iterator[tuple[int, Tensor]]:
    """Shift and codes of what each stripe has in the bytes from `first` on; the last stripes may end early."""
    for position in range(8 // width):
        start = position * length + first
        stop = min(position * length + min(first + _BLOCK, length), len(codes))
        if start < stop:
            yield position * width, codes[start:stop]


def _pack_plane(codes: Tensor, low: int, width: int, bits: int, out: Tensor) -> None:
    """Bits `low` to `low + width` of codes of `bits` bits."""
    length = len(out)
    scratch = torch.empty(min(length, _BLOCK), dtype=torch.uint8, device=out.device)
    for first in range(0, length, _BLOCK):
        for shift, stripe in _stripes(codes, width, length, first):
            target, part = out[first : first + len(stripe)], stripe
            if width < bits:
                part = torch.bitwise_right_shift(stripe, low, out=scratch[: len(stripe)])
                part &= (1 << width) - 1
            if shift == 0:
                target.copy_(part)
            else:
                target |= torch.bitwise_left_shift(part, shift, out=scratch[: len(stripe)])


def _unpack_plane(packed: Tensor, low: int, width: int, out: Tensor) -> None:
    """Set (for the lowest plane) or add the bits `low` to `low + width` of all codes."""
    length, mask = len(packed), (1 << width) - 1
    scratch = torch.empty(min(length, _BLOCK), dtype=torch.uint8, device=out.device)
    for first in range(0, length, _BLOCK):
        for shift, stripe in _stripes(out, width, length, first):
            source = packed[first : first + len(stripe)]
            part = scratch[: len(stripe)] if low else stripe
            if shift == 0:
                torch.bitwise_and(source, mask, out=part)
            else:
                torch.bitwise_right_shift(source, shift, out=part)
                if shift + width < 8:
                    part &= mask
            if low:
                stripe |= part.bitwise_left_shift_(low)


def _check(tensor: Tensor, shape: tuple[int, ...], what: str) -> None:
    if tensor.dtype != torch.uint8 or tensor.shape != shape:
        raise ValueError(f"{what} must be uint8 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
