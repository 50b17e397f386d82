"""A delta as low-rank factors plus a few elements of what these leave over."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from moetool.numerics.work import Work
from moetool.representations.base import Representation, Stored, Weight
from moetool.representations.low_rank import LowRank
from moetool.representations.measured import NOTHING, Measured
from moetool.representations.operand import Products
from moetool.representations.sparse import MagnitudeSparse, Sparse

_RESIDUALS: dict[str, type[Sparse] | type[MagnitudeSparse]] = {
    Sparse.kind: Sparse,
    MagnitudeSparse.kind: MagnitudeSparse,
}


@dataclass(frozen=True)
class LowRankSparse(Representation):
    """`U [out, rank]`, `V [rank, in]`, and the residual's elements as `Sparse` or `MagnitudeSparse` stores them."""

    rank: int
    residual: Sparse | MagnitudeSparse
    kind: ClassVar[str] = "low-rank-sparse"
    uses_base: ClassVar[bool] = True
    is_cheap: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = (
        "low-rank-sparse:2:sparse:0.8:3",
        "low-rank-sparse:3:sparse-magnitude:0.1",
    )

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"'{self.kind}' has a rank of at least 1, not {self.rank}")

    @property
    def spec(self) -> str:
        return f"{self.kind}:{self.rank}:{self.residual.spec}"

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        if len(arguments) < 2 or not arguments[0].isdigit() or arguments[1] not in _RESIDUALS:
            raise ValueError(f"'{cls.kind}' takes its rank and then one of {', '.join(_RESIDUALS)} with its arguments")
        return cls(int(arguments[0]), _RESIDUALS[arguments[1]].from_arguments(arguments[2:]))

    @property
    def label(self) -> str:
        return f"{self.kind}:{self.rank}:{self.residual.label}"

    @property
    def directions(self) -> int:
        return self.rank

    @property
    def low_rank(self) -> LowRank:
        """The representation that stores the low-rank part: its factors in the dtype of the model."""
        return LowRank(self.rank)

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        return self.low_rank.tensors(shape) | self.residual.tensors(shape)

    def counted_parameters(self, shape: tuple[int, int]) -> float:
        return self.low_rank.counted_parameters(shape) + self.residual.counted_parameters(shape)

    def multiplications(self, shape: tuple[int, int]) -> int:
        return self.low_rank.multiplications(shape) + self.residual.multiplications(shape)

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        narrow = min(matrix)
        products = matrix[0] * matrix[1] * (0.625 * narrow + self.rank)
        factors = Work(products={"float32": products}, eigen={narrow: 1.0})
        return super().work(matrix) + factors + self.residual.work(matrix)

    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        """The residual is what the factors leave over as they will be stored."""
        factors = self.low_rank.encode(matrix, dtype, measured)
        left = matrix.detach().float() - factors["u"].float() @ factors["v"].float()
        return factors | self.residual.encode(left, dtype, measured)

    def damage(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str | None:
        return self.residual.damage(tensors, shape)

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return LowRankSparseWeight(self, shape, dtype, device)


class LowRankSparseWeight(Weight):
    """Run-time form of `LowRankSparse`. Its tensors have the names of both parts, without a prefix."""

    def __init__(
        self, representation: LowRankSparse, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        factors = representation.low_rank.build(shape, dtype, device)
        residual = representation.residual.build(shape, dtype, device)
        # In a tuple, and what they hold is what this module holds, under the same names: names on disk are flat.
        self._parts = (factors, residual)
        for part in self._parts:
            self._parameters.update(part._parameters)
            self._buffers.update(part._buffers)
            part._parameters, part._buffers = self._parameters, self._buffers

    def forget(self) -> None:
        for part in self._parts:
            part.forget()

    def derived(self) -> tuple[Tensor, ...]:
        return self._parts[1].derived()

    def forward(self, inputs: Tensor) -> Tensor:
        factors, residual = self._parts
        return factors(inputs) + residual(inputs)

    def dense(self) -> Tensor:
        factors, residual = self._parts
        return factors.dense() + residual.dense()

    def products(self) -> Products:
        return tuple(chain for part in self._parts for chain in part.products() or ())
