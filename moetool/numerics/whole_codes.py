"""Evenly spaced codes of 4 or 8 bits, one scale per group of inputs, packed into words as other engines read them.

A matrix [out, in] is cut along its inputs into groups of equal length; an element is q · scale[group] with a whole q
from −2^(b−1) to 2^(b−1) − 1. The levels of `numerics.quantization` lose less in few bits (they suit normal weights);
these are what integer kernels multiply with.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

WHOLE_BITS = (4, 8)

_CHUNK = 1 << 18  # elements worked on at a time
# Scales tried, by the share of a group's largest magnitude that the highest code stands for.
_CLIPS = {4: (0.68, 0.74, 0.8, 0.86, 0.92, 1.0, 1.08), 8: (0.96, 0.98, 0.99, 1.0, 1.01)}


def quantize_whole(matrix: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales with a small squared error.

    Of several scales per group, each made the best for its codes, then rounded to `dtype`, the one whose own nearest
    codes lose least is taken.

    Args:
        matrix: [out, in], floating.
        bits: one of `WHOLE_BITS`.
        group: inputs that share a scale, a divisor of `in`.
        dtype: of the scales.

    Returns:
        codes [out, in] int8 and scales [out, in / group] in `dtype`.

    Raises:
        ValueError: bits or group do not fit, or values that are not finite.
    """
    rows, columns = matrix.shape
    if bits not in WHOLE_BITS:
        raise ValueError(f"codes have {' or '.join(map(str, WHOLE_BITS))} bits, not {bits}")
    if group < 1 or columns % group:
        raise ValueError(f"groups of {group} do not divide {columns} columns")
    codes = torch.empty(rows, columns, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(rows, columns // group, dtype=dtype, device=matrix.device)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values = matrix[part].detach().float().contiguous().view(-1, columns // group, group)
        if not bool(values.isfinite().all()):
            raise ValueError("a matrix with values that are not finite cannot be quantized")
        found, scale = _search(values, bits, dtype)
        codes[part] = found.to(torch.int8).view(-1, columns)
        scales[part] = scale.squeeze(2)
    return codes, scales


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """`codes` [out, in] int8 as [out, ⌈in · bits / 32⌉] int32.

    Of each q + 2^(b−1); the first code of a word is in its lowest bits, and zeros are behind a row's last.

    Raises:
        ValueError: `bits` is not one of `WHOLE_BITS`.
    """
    if bits not in WHOLE_BITS:
        raise ValueError(f"codes have {' or '.join(map(str, WHOLE_BITS))} bits, not {bits}")
    shifted = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    shifted = pad(shifted, (0, -codes.shape[1] % (32 // bits)))
    if bits == 4:
        shifted = shifted[:, 0::2] | (shifted[:, 1::2] << 4)
    return shifted.contiguous().view(torch.int32)


def _search(values: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales [rows, groups, 1], rounded to `dtype`, of groups [rows, groups, group]."""
    # Groups are brought to unit size, so that no square under- or overflows.
    size = values.abs().amax(2, keepdim=True)
    size = torch.where(size > 0, size, 1)
    unit = values / size
    highest = 2 ** (bits - 1) - 1
    best = torch.full_like(size, torch.inf)
    codes, scales = torch.zeros_like(unit), torch.zeros_like(size, dtype=dtype)
    for clip in _CLIPS[bits]:
        first = _nearest(unit, torch.full_like(size, clip / highest), bits)
        norm = first.square().sum(2, keepdim=True)
        fitted = (first * unit).sum(2, keepdim=True) / torch.where(norm > 0, norm, 1)
        rounded = (fitted * size).to(dtype)
        scale = rounded.float() / size
        own = _nearest(unit, scale, bits)
        lost = (unit - own * scale).square_().sum(2, keepdim=True)
        better = lost < best
        best = torch.where(better, lost, best)
        codes, scales = torch.where(better, own, codes), torch.where(better, rounded, scales)
    return codes, scales


def _nearest(unit: Tensor, scale: Tensor, bits: int) -> Tensor:
    ratio = unit / torch.where(scale > 0, scale, torch.inf)
    return ratio.round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
