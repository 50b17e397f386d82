"""An ascending set of indices, packed, whose size depends on how many there are and not on which.

Either a bit per element, or Elias and Fano's code: the lowest bits of every index as they are, the rest in unary, as
the ones among as many zeros as there are values of the rest (P. Elias, "Efficient storage and retrieval by content and
address of static files", JACM 1974). At k of n = 10 % that is 5.3 bits per index, against 8 for byte-sized gaps,
10 for a bit per element and 4.7 for the entropy; and no gap needs an escape.
"""

import torch
from torch import Tensor

from moetool.numerics.packing import pack, packed_size, unpack

_DIRECT = 0  # "low bits" of a bit per element


def index_sizes(n: int, k: int) -> dict[str, int]:
    """Bytes of each tensor that holds k of n indices: `mask`, or `low` and `high`, whatever is less in all."""
    low_bits = _low_bits(n, k)
    if low_bits == _DIRECT:
        return {"mask": packed_size(n, 1)}
    return {"low": packed_size(k, low_bits), "high": packed_size(_high_length(n, k, low_bits), 1)}


def encode_indices(indices: Tensor, n: int) -> dict[str, Tensor]:
    """Pack `indices` [k], ascending, all different and below n, into uint8 tensors of `index_sizes(n, k)`."""
    k = len(indices)
    low_bits = _low_bits(n, k)
    if low_bits == _DIRECT:
        return {"mask": pack(_marks(indices, n), 1)}
    low = (indices & ((1 << low_bits) - 1)).to(torch.uint8)
    marks = (indices >> low_bits) + torch.arange(k, device=indices.device)
    return {"low": pack(low, low_bits), "high": pack(_marks(marks, _high_length(n, k, low_bits)), 1)}


def are_indices(indices: Tensor, n: int) -> bool:
    """Whether all of `indices` [k] are different and from 0 up to n, n excluded."""
    ordered = indices.long().sort().values
    return not len(ordered) or bool((ordered[0] >= 0) & (ordered[-1] < n) & (ordered.diff() > 0).all())


def decode_indices(tensors: dict[str, Tensor], n: int, k: int) -> Tensor:
    """Inverse of `encode_indices`: [k] int32.

    Raises:
        ValueError: the tensors do not hold k indices below n.
    """
    low_bits = _low_bits(n, k)
    if low_bits == _DIRECT:
        indices = unpack(tensors["mask"], 1, n).nonzero().view(-1)
    else:
        marks = unpack(tensors["high"], 1, _high_length(n, k, low_bits)).nonzero().view(-1)
        if len(marks) == k:
            high = marks - torch.arange(k, device=marks.device)
            indices = (high << low_bits) | unpack(tensors["low"], low_bits, k)
        else:
            indices = marks
    if len(indices) != k or (k and not bool((indices[-1] < n) & (indices.diff() > 0).all())):
        raise ValueError(
            f"{len(indices)} indices were found where {k} in ascending order and below {n} should be: the tensors are "
            "damaged"
        )
    return indices.int()


def _low_bits(n: int, k: int) -> int:
    """How many bits are stored as they are, or 0 for a bit per element. Depends on n and k alone: files rely on it."""
    sizes = {_DIRECT: packed_size(n, 1)}
    for bits in range(1, 9):
        sizes[bits] = packed_size(k, bits) + packed_size(_high_length(n, k, bits), 1)
    return min(sizes, key=lambda bits: (sizes[bits], bits))


def _high_length(n: int, k: int, low_bits: int) -> int:
    """A one per index, a zero per step of the part above the low bits, which starts at 0."""
    return k + ((n - 1) >> low_bits)


def _marks(positions: Tensor, length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.uint8, device=positions.device).index_fill_(0, positions.long(), 1)
