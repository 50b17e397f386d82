"""The numbers of llama.cpp's blocks, before they become bytes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class BlockParts:
    """The numbers of blocks.

    Attributes:
        codes: `[blocks, numbers]` uint8, of each number.
        scales, minima: `[blocks, groups]` int16, codes of scales and of minima (zeros where a type has none).
        d, dmin: `[blocks]` fp16, the units of scales and of minima.
    """

    codes: _Bytes
    scales: NDArray[np.int16]
    minima: NDArray[np.int16]
    d: NDArray[np.float16]
    dmin: NDArray[np.float16]
