"""Block-Hadamard rotations with random signs, which spread what single inputs carry over all of a block.

A matrix W [out, in] can be stored as W Rᵀ and multiplied with R x, for an orthogonal R. What is left of outliers and of
correlation between few inputs then looks like noise, which codes in few bits hold better (QuIP#, Tseng et al.,
arXiv:2402.04396; QuaRot, Ashkboos et al., arXiv:2404.00456). R is blockdiag(H) · diag(s): H is the orthonormal
Walsh-Hadamard matrix of the largest power of two that divides the width, s are signs from a counter-based generator.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from moetool.numerics.counter import key, words


@dataclass(frozen=True)
class Rotation:
    """A random orthogonal matrix R [width, width], which a seed determines on every device and in every version."""

    width: int
    seed: int

    @property
    def block(self) -> int:
        """Inputs that are mixed with each other: blocks of the largest power of two that divides the width."""
        return self.width & -self.width

    @property
    def multiplications(self) -> int:
        """Number of scalar multiplications that rotating one row takes: two factors per block, each of about √block
        columns."""
        bits = self.block.bit_length() - 1
        return self.width * (2 ** (bits // 2) + 2 ** (bits - bits // 2))

    def __call__(self, rows: Tensor) -> Tensor:
        """R x of every row x: `[…, width]` → the same; of a matrix `[out, width]`, W Rᵀ."""
        return self._mixed(rows * self._signs(rows))

    def back(self, rows: Tensor) -> Tensor:
        """Rᵀ y of every row y: what `__call__` has been given, up to rounding."""
        return self._mixed(rows) * self._signs(rows)

    def gram(self, gram: Tensor) -> Tensor:
        """Return R G Rᵀ, the Gram matrix of rotated inputs, for the Gram matrix G `[width, width]` of the inputs."""
        return self(self(gram).T)

    def _signs(self, like: Tensor) -> Tensor:
        return _signs(self.width, self.seed, like.dtype, like.device)

    def _mixed(self, rows: Tensor) -> Tensor:
        """H of every block. A Hadamard matrix is the Kronecker product of two: two products with small matrices, block
        by block, so that a row is told the same whatever others are beside it."""
        bits = self.block.bit_length() - 1
        first, second = (_hadamard(count, rows.dtype, rows.device) for count in (bits // 2, bits - bits // 2))
        parts = rows.reshape(-1, len(first), len(second))
        parts = torch.bmm(first.expand(len(parts), *first.shape), parts)
        return torch.bmm(parts, second.expand(len(parts), *second.shape)).view(rows.shape).to(rows.dtype)


def rotated(matrix: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotate the inputs of a matrix `[out, in]`, if there is a rotation."""
    return matrix if rotation is None else rotation(matrix)


@cache
def _signs(width: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[width] of -1 and 1: the highest bits of the words of the stream `key(seed, "rotation")`."""
    high = (words(key(seed, "rotation"), 0, width) >> np.uint64(63)).astype(np.int8)
    with torch.inference_mode(False):  # what is kept must serve training too
        return torch.from_numpy(2 * high - 1).to(device, dtype)


@cache
def _hadamard(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[2^bits, 2^bits], orthonormal."""
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=torch.float64)
        for _ in range(bits):
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return (matrix / 2 ** (bits / 2)).to(device, dtype)


# The mark of `torch.compiler.assume_constant_result`, which imports all of the compiler for it: seconds at every start.
for _table in (_signs, _hadamard):
    _table._dynamo_marked_constant = True  # type: ignore[attr-defined]
