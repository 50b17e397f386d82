"""What a stored matrix is made of for those who multiply by it as it lies in memory."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["numbers", "codes", "nf4", "int8", "sparse"]


@dataclass(frozen=True, eq=False)
class Operand:
    """One stored matrix M `[rows, columns]`.

    Attributes:
        kind: how `data` stands for it: `numbers` as they are, packed `codes` of `bits` bits (`numerics.packing`), `nf4`
            or `int8` as bitsandbytes has them, or the values of a `sparse` matrix.
        shape: rows and columns.
        data: the stored numbers, codes or values.
        scales: what codes are multiplied by, one per `group` of a row (of the flattened matrix for nf4); of a sparse
            matrix the ascending positions [count] int32 of its values in the flattened matrix.
        bits: of a code.
        group: columns that share a scale.
        transposed: inputs `[tokens, rows]` are multiplied by M instead of inputs `[tokens, columns]` by its transpose.
    """

    kind: Kind
    shape: tuple[int, int]
    data: Tensor
    scales: Tensor | None = None
    bits: int = 0
    group: int = 0
    transposed: bool = False

    @property
    def inputs(self) -> int:
        """Numbers that it is multiplied with."""
        return self.shape[0] if self.transposed else self.shape[1]

    @property
    def outputs(self) -> int:
        """Numbers that come of it."""
        return self.shape[1] if self.transposed else self.shape[0]


def numbers(matrix: Tensor) -> Operand:
    """A matrix `[rows, columns]` as it is."""
    rows, columns = matrix.shape
    return Operand("numbers", (rows, columns), matrix)


def factors(u: Tensor, v: Tensor) -> tuple[Operand, Operand]:
    """The chain of U `[out, rank]` after V `[rank, in]`."""
    return numbers(v), numbers(u)


# A sum of chains of products: each chain is multiplied from its first operand to its last. None at all is zero.
Products = tuple[tuple[Operand, ...], ...]
