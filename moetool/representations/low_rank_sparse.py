"""A difference as low-rank factors plus a few elements of what these leave over."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from moetool.representations.base import Representation, Stored, Weight
from moetool.representations.low_rank import LowRank
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
    def factors(self) -> LowRank:
        """The low-rank part."""
        return LowRank(self.rank)

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        return self.factors.tensors(shape) | self.residual.tensors(shape)

    def counted_parameters(self, shape: tuple[int, int]) -> float:
        return self.factors.counted_parameters(shape) + self.residual.counted_parameters(shape)

    def encode(
        self, delta: Tensor, dtype: torch.dtype, *, u: Tensor, v: Tensor, importance: Tensor | None = None
    ) -> dict[str, Tensor]:
        """What is stored of `delta` [out, in] in a model of `dtype`.

        Args:
            delta: floating.
            dtype: of everything stored but positions.
            u: [out, rank] and
            v: [rank, in], the factors as they will be stored.
            importance: [in], how much each input counts where the largest elements are kept.
        """
        factors = {"u": u.to(dtype), "v": v.to(dtype)}
        left = delta.float() - factors["u"].float() @ factors["v"].float()
        if isinstance(self.residual, MagnitudeSparse):
            return factors | self.residual.encode(left, dtype, importance=importance)
        return factors | self.residual.encode(left, dtype)

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return LowRankSparseWeight(self, shape, dtype, device)


class LowRankSparseWeight(Weight):
    """Run-time form of `LowRankSparse`. Its tensors have the names of both parts, without a prefix."""

    def __init__(
        self, representation: LowRankSparse, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        factors = representation.factors.build(shape, dtype, device)
        residual = representation.residual.build(shape, dtype, device)
        # In a tuple, and what they hold is what this module holds, under the same names: names on disk are flat.
        self._parts = (factors, residual)
        for part in self._parts:
            self._parameters.update(part._parameters)
            self._buffers.update(part._buffers)
            part._parameters, part._buffers = self._parameters, self._buffers

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        for part in self._parts:
            part.forget()

    def forward(self, inputs: Tensor) -> Tensor:
        factors, residual = self._parts
        return factors(inputs) + residual(inputs)

    def dense(self) -> Tensor:
        factors, residual = self._parts
        return factors.dense() + residual.dense()
