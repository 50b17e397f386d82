"""Rows in MXFP4: 32 numbers of 4 bits (E2M1) and a power of two, as gpt-oss is published.

Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf; the layout of a block is
that of https://github.com/ggml-org/llama.cpp (`block_mxfp4`): the power, then 16 bytes with two numbers each.
"""

import torch
from torch import Tensor

_BLOCK, _BIAS, _LARGEST = 32, 127, 2  # the largest number of a block has this power of two beside the block's
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # of 0, .5, 1, 1.5, 2, 3, 4, 6: the middles
_NEGATIVE = 8


def mxfp4_bytes(rows: Tensor) -> Tensor:
    """Nearest codes of rows under the power that the largest number of each block fits; numbers that are MXFP4
    already are kept exactly.

    Args:
        rows: `[rows, columns]`, floating and finite; 32 divides the columns.

    Returns:
        uint8 `[rows, columns / 32 · 17]`.
    """
    blocks = rows.detach().float().reshape(-1, _BLOCK)
    largest = blocks.abs().amax(1)
    power = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - _LARGEST + _BIAS, 0).clamp_(0, 254)
    scaled = torch.ldexp(blocks, (_BIAS - power)[:, None])
    codes = torch.bucketize(scaled.abs(), torch.tensor(_BETWEEN, device=rows.device)).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) * _NEGATIVE
    low, high = codes.split(_BLOCK // 2, dim=1)
    return torch.cat([power.to(torch.uint8)[:, None], low | high << 4], dim=1).view(len(rows), -1)
