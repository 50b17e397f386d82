"""Codes of few bits packed into words of 32 bits, as other engines read them."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_WORD = 32  # bits


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """`codes` [out, in] uint8 as [out, ⌈in · bits / 32⌉] int32, without gaps; the first code of a row is in the lowest
    bits of its first word, and zeros are behind the last.

    Raises:
        ValueError: `bits` are not 1 to 8.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codes in words have 1 to 8 bits, not {bits}")
    rows, columns = codes.shape
    padded = pad(codes, (0, -columns % _WORD)).view(rows, -1, 8)
    # Eight codes are as many bytes as a code has bits: byte by byte, what of each code begins, goes on or ends there.
    packed = torch.zeros(*padded.shape[:2], bits, dtype=torch.uint8, device=codes.device)
    for place in range(8):
        byte, low = divmod(place * bits, 8)
        packed[..., byte] |= padded[..., place] << low
        if low + bits > 8:
            packed[..., byte + 1] |= padded[..., place] >> (8 - low)
    words = packed.view(rows, -1).view(torch.int32)
    return words[:, : -(-columns * bits // _WORD)].contiguous()
