"""Matrices in llama.cpp's blocks become the bytes that a GGUF file holds."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moetool.export.blocks.blocked import Blocked
from moetool.format.gguf.blocks import BlockType
from moetool.format.gguf.parts import BlockParts


def packed(blocked: Blocked, kind: BlockType) -> Tensor:
    """The blocks of every row, one after the other: `[out, bytes]` uint8.

    Args:
        blocked: `[out, in]`, in blocks of this kind.
        kind: its type in a file.
    """

    def flat(numbers: Tensor, width: int) -> NDArray[np.generic]:
        return numbers.T.contiguous().cpu().numpy().reshape(-1, width)

    groups = blocked.groups_per_block
    parts = BlockParts(
        flat(blocked.codes, kind.numbers).astype(np.uint8),
        flat(blocked.scales, groups).astype(np.int16),
        flat(blocked.minima, groups).astype(np.int16),
        flat(blocked.d, 1)[:, 0].astype(np.float16),
        flat(blocked.dmin, 1)[:, 0].astype(np.float16),
    )
    return torch.from_numpy(kind.pack(parts).reshape(blocked.codes.shape[1], -1))
