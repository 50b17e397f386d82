"""Evenly spaced codes of few bits, one scale per group of inputs, packed into words as other engines read them.

A matrix [out, in] is cut along its inputs into groups of equal length; an element is q · scale[group] with a whole q
from −2^(b−1) to 2^(b−1) − 1. The levels of `numerics.quantization` lose less in few bits (they suit normal weights);
these are what integer kernels multiply with.

Below 8 bits scales have signs: the level beyond the others, −2^(b−1), then stands on the side where a group needs it.
On normal weights in groups of 128 that leaves an error of .361, .184, .095 at 2, 3, 4 bits, not .379, .192, .099.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moetool.numerics.compiled_rounding import CompiledRounding
from moetool.numerics.error_feedback import Coded, Feedback, better_codes
from moetool.numerics.groups import check_group, in_parts, weights_of
from moetool.numerics.output_codes import EachByItself

WHOLE_BITS = (2, 3, 4, 8)

_WORD = 32  # bits
# Scales tried, by the share of a group's largest magnitude that the highest code stands for; few bits with both signs.
_CLIPS = {
    2: (0.3, 0.36, 0.42, 0.5, 0.6, 0.72),
    3: (0.5, 0.58, 0.66, 0.74, 0.84, 0.95),
    4: (0.7, 0.78, 0.86, 0.94, 1.04),
    8: (0.96, 0.98, 0.99, 1.0, 1.01),
}


def quantize_whole(
    matrix: Tensor, bits: int, group: int, dtype: torch.dtype, *, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales with a small weighted squared error.

    Of several scales per group, each made the best for its codes, then rounded to `dtype`, the one whose own nearest
    codes lose least is taken.

    Args:
        matrix: [out, in], floating.
        bits: one of `WHOLE_BITS`.
        group: inputs that share a scale, a divisor of `in`.
        dtype: of the scales.
        importance: [in], not negative, how much the squared error of each input counts; `None` for all the same.

    Returns:
        codes [out, in] int8 and scales [out, in / group] in `dtype`.

    Raises:
        ValueError: bits, group or importance do not fit, or values that are not finite.
    """
    rows, columns = matrix.shape
    _check(bits)
    check_group(columns, group)
    weights = weights_of(importance, columns, group, matrix.device)
    codes = torch.empty(rows, columns, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(rows, columns // group, dtype=dtype, device=matrix.device)
    for part, values in in_parts(matrix, group):
        found, scale = _search(values, weights, bits, dtype)
        codes[part] = found.to(torch.int8).view(-1, columns)
        scales[part] = scale.squeeze(2)
    return codes, scales


def feed_back_whole(matrix: Tensor, codes: Tensor, scales: Tensor, bits: int, feedback: Feedback) -> Tensor:
    """Codes with a smaller output error than the nearest ones, for given scales; no row's is larger.

    Args:
        matrix: [out, in], floating and finite.
        codes: [out, in] int8, the nearest ones, e.g. those of `quantize_whole`.
        scales: [out, groups] as they will be stored.
        bits: of the codes.
        feedback: of the inputs.

    Returns:
        [out, in] int8.

    Raises:
        ValueError: there are other inputs behind the feedback.
    """
    feedback.check(matrix.shape[1])
    values = matrix.detach().float()
    errors = values.T.contiguous()[feedback.order]
    nearest, half, own = values - decode_whole(codes, scales), 2 ** (bits - 1), scales.float().T.contiguous()
    whole = CompiledRounding(own, 1 / torch.where(own != 0, own, torch.inf), -half, half - 1)
    from_zero = (codes.to(torch.int16) + half).to(torch.uint8)
    found = better_codes(errors, nearest, from_zero, whole, scales.shape[1], feedback)
    return (found.to(torch.int16) - half).to(torch.int8)


def decode_whole(codes: Tensor, scales: Tensor) -> Tensor:
    """Multiply codes [out, in] by their groups' scales [out, groups]: [out, in] fp32."""
    return codes * scales.float().repeat_interleave(codes.shape[1] // scales.shape[1], 1)


class WholeCodes(EachByItself):
    """A `Coder` of signed whole numbers times the scale of their group, as other engines read them (GPTQ, AWQ)."""

    noise: ClassVar[Mapping[int, float]] = {2: 0.130, 3: 0.034}

    def fed_back(self, parts: Sequence[Coded], feedback: Feedback) -> list[Tensor]:
        return [self._fed_back(part, feedback) for part in parts]

    def decoded(self, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
        return decode_whole(codes, scales)

    def _fed_back(self, part: Coded, feedback: Feedback) -> Tensor:
        codes = part.codes
        if codes is None:
            groups = part.matrix.detach().float().unflatten(1, (part.scales.shape[1], -1))
            codes = _nearest(groups, part.scales.float().unsqueeze(2), part.bits).flatten(1).to(torch.int8)
        return feed_back_whole(part.matrix, codes, part.scales, part.bits, feedback)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """`codes` [out, in] int8 as [out, ⌈in · bits / 32⌉] int32.

    Of each q + 2^(b−1), without gaps; the first code of a row is in the lowest bits of its first word, and zeros are
    behind the last.

    Raises:
        ValueError: `bits` is not one of `WHOLE_BITS`.
    """
    _check(bits)
    rows, columns = codes.shape
    shifted = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    shifted = pad(shifted, (0, -columns % _WORD)).view(rows, -1, 8)
    # Eight codes are as many bytes as a code has bits: byte by byte, what of each code begins, goes on or ends there.
    packed = torch.zeros(*shifted.shape[:2], bits, dtype=torch.uint8, device=codes.device)
    for place in range(8):
        byte, low = divmod(place * bits, 8)
        packed[..., byte] |= shifted[..., place] << low
        if low + bits > 8:
            packed[..., byte + 1] |= shifted[..., place] >> (8 - low)
    words = packed.view(rows, -1).view(torch.int32)
    return words[:, : -(-columns * bits // _WORD)].contiguous()


def _check(bits: int) -> None:
    if bits not in WHOLE_BITS:
        raise ValueError(f"codes have {', '.join(map(str, WHOLE_BITS))} bits, not {bits}")


def _search(values: Tensor, weights: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales [rows, groups, 1], rounded to `dtype`, of groups [rows, groups, group]."""
    # Groups are brought to unit size, so that no square under- or overflows.
    size = values.abs().amax(2, keepdim=True)
    size = torch.where(size > 0, size, 1)
    unit = values / size
    highest = 2 ** (bits - 1) - 1
    best = torch.full_like(size, torch.inf)
    codes, scales = torch.zeros_like(unit), torch.zeros_like(size, dtype=dtype)
    for clip in _CLIPS[bits] if bits == 8 else [sign * clip for clip in _CLIPS[bits] for sign in (1, -1)]:
        first = _nearest(unit, torch.full_like(size, clip / highest), bits)
        weighted = first * weights
        norm = (weighted * first).sum(2, keepdim=True)
        fitted = (weighted * unit).sum(2, keepdim=True) / torch.where(norm > 0, norm, 1)
        rounded = (fitted * size).to(dtype)
        scale = rounded.float() / size
        own = _nearest(unit, scale, bits)
        lost = (unit - own * scale).square_().mul_(weights).sum(2, keepdim=True)
        better = lost < best
        best = torch.where(better, lost, best)
        codes, scales = torch.where(better, own, codes), torch.where(better, rounded, scales)
    return codes, scales


def _nearest(unit: Tensor, scale: Tensor, bits: int) -> Tensor:
    ratio = unit / torch.where(scale != 0, scale, torch.inf)
    return ratio.round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
