"""Operands: descriptions of a stored matrix for kernels that multiply by it as it lies in memory."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WORD = 64  # columns of a sparse matrix whose bits lie in one number


@dataclass(frozen=True, eq=False)
class Operand:
    """One stored matrix M `[rows, columns]`.

    Attributes:
        kind: how `data` stands for it: `numbers` as they are, packed `codes` of `bits` bits (`numerics.packing`), the
            same in a `trellis`, `nf4` or `int8` as bitsandbytes has them, the values of a `sparse` matrix, or bytes for
            which the kernels have a file of this name (`kernels.forms`).
        shape: rows and columns.
        data: the stored numbers, codes or values.
        scales: what codes are multiplied by, one per `group` of a row (of the flattened matrix for nf4); of a sparse
            matrix the ascending positions [count] int32 of its values in the flattened matrix, or with a `group` of 64
            where the values of every row begin and a bit per column, [rows, 1 + ⌈columns / 64⌉] int64.
        bits: of a code.
        group: columns that share a scale.
        transposed: inputs `[tokens, rows]` are multiplied by M instead of inputs `[tokens, columns]` by its transpose.
        places: [rows] int32, which of more outputs these are; `None` for all of them in their order.
        levels: fp32, what the bytes of `nf4` or of a kind with a file of its own stand for, if a table says that; to be
            kept for good.
    """

    kind: str
    shape: tuple[int, int]
    data: Tensor
    scales: Tensor | None = None
    bits: int = 0
    group: int = 0
    transposed: bool = False
    places: Tensor | None = None
    levels: Tensor | None = None

    @property
    def inputs(self) -> int:
        """Number of inputs per token that the operand is multiplied with."""
        return self.shape[0] if self.transposed else self.shape[1]

    @property
    def outputs(self) -> int:
        """Number of outputs per token of a product with the operand."""
        return self.shape[1] if self.transposed else self.shape[0]


def numbers(matrix: Tensor) -> Operand:
    """Make an operand of a matrix `[rows, columns]` of floating-point numbers, without a copy."""
    rows, columns = matrix.shape
    return Operand("numbers", (rows, columns), matrix)


def marked(shape: tuple[int, int], values: Tensor, positions: Tensor) -> Operand:
    """A sparse matrix by the bits of its columns, from ascending positions [count] int32, on a CPU."""
    rows, columns = shape
    marks = torch.zeros(rows, -(-columns // WORD) * WORD, dtype=torch.uint8)
    whole = positions.long()
    marks[whole // columns, whole % columns] = 1
    bits = torch.from_numpy(np.packbits(marks.numpy(), axis=1, bitorder="little")).view(torch.int64)
    starts = torch.searchsorted(positions, torch.arange(rows).mul(columns).to(positions.dtype))
    return Operand("sparse", shape, values, torch.cat([starts[:, None], bits], 1), group=WORD)


def by_positions(operand: Operand) -> Operand:
    """A sparse matrix by the positions of its values, however it is stored."""
    if operand.group != WORD or operand.scales is None:
        return operand
    bits = operand.scales[:, 1:].contiguous().view(torch.uint8).numpy()
    marks = np.unpackbits(bits, axis=1, bitorder="little")[:, : operand.shape[1]]
    return Operand("sparse", operand.shape, operand.data, torch.from_numpy(np.flatnonzero(marks)).int())


def factors(u: Tensor, v: Tensor) -> tuple[Operand, Operand]:
    """Make the two operands of a low-rank matrix U V, in the order in which inputs meet them: V `[rank, in]`, U `[out,
    rank]`."""
    return numbers(v), numbers(u)


# A sum of chains of products: each chain is multiplied from its first operand to its last. None at all is zero.
Products = tuple[tuple[Operand, ...], ...]
