"""Selection of the bytes that a checkpoint's fingerprint reads: small tensors whole, blocks of large matrices.

The smallest tensors are read whole, as many as fit into 256 MiB or 1/256 of the weights, whichever is more. Any other
matrix (the last two dimensions of a tensor, so that each expert of a fused one counts) is cut into equal parts of
8 MiB at most, and of each part one block of 16 KiB is read, at a place that follows from its number alone.

So a change to all of a tensor, a matrix or a part is always seen. One to `r` consecutive bytes of a part of 8 MiB is
seen with a chance of `(r + 16 KiB) / 8 MiB`: one in 340 for a row of 8 KiB, one in 512 for a single number.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from moetool.checkpoint.header import TensorInfo, reading
from moetool.errors import InvalidInputError

_WHOLE_BYTES, _WHOLE_SHARE = 256 << 20, 256
_PART_BYTES, _BLOCK_BYTES = 8 << 20, 16 << 10
_OWN_MATRIX = 1 << 20  # smaller ones of a fused tensor are sampled together
_GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, are spread evenly however many there are
_PIECE = 1 << 20


class FileSpan(NamedTuple):
    """Consecutive bytes of a tensor's file: the first, counted from the start of the file, and how many."""

    start: int
    length: int


def whole_limit(tensors: Iterable[TensorInfo]) -> int:
    """Size in bytes up to which a fingerprint reads tensors whole; tensors of one size are all read whole, or none."""
    sizes = sorted(info.nbytes for info in tensors)
    left = max(_WHOLE_BYTES, sum(sizes) // _WHOLE_SHARE)
    limit = 0
    for size, same in groupby(sizes):
        left -= size * len(list(same))
        if left < 0:
            break
        limit = size
    return limit


def spans(info: TensorInfo, limit: int) -> Iterator[FileSpan]:
    """Yield the spans of a tensor that are read: all of it up to `limit` bytes, else a block of each part."""
    if info.nbytes <= limit:
        yield FileSpan(info.offset, info.nbytes)
        return
    matrices = math.prod(info.shape[:-2]) or 1
    if info.nbytes // matrices < _OWN_MATRIX:
        matrices = 1
    size = info.nbytes // matrices
    parts = -(-size // _PART_BYTES)
    for number in range(matrices * parts):
        begin, end = (info.nbytes * edge // (matrices * parts) for edge in (number, number + 1))
        length = min(_BLOCK_BYTES, end - begin)
        place = (number + 1) * _GOLDEN % 1
        yield FileSpan(info.offset + begin + int(place * (end - begin - length + 1)), length)


def sampled(tensors: Iterable[TensorInfo]) -> bytes:
    """SHA-256 over what is read of tensors, in the order of their files and of their places there.

    Raises:
        InvalidInputError: a file cannot be read, or ends before a tensor does.
    """
    ordered = sorted(tensors, key=lambda info: (info.file, info.offset))
    limit, digest = whole_limit(ordered), hashlib.sha256()
    for file, held in groupby(ordered, key=lambda info: info.file):
        wanted = [span for info in held for span in spans(info, limit)]
        with reading(file), file.open("rb", buffering=0) as stream:
            _announce(stream.fileno(), wanted)
            for start, length in wanted:
                for position in range(start, start + length, _PIECE):
                    expected = min(_PIECE, start + length - position)
                    if len(piece := os.pread(stream.fileno(), expected, position)) != expected:
                        raise InvalidInputError(f"{file} ends before byte {start + length}: it has changed.")
                    digest.update(piece)
    return digest.digest()


def _announce(descriptor: int, wanted: Iterable[FileSpan]) -> None:
    """Let the system fetch all of it at once, and nothing around it, where it can be asked to."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for start, length in wanted:
            os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)
