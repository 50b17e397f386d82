"""A delta to the shared base as a product of two thin matrices, `W ≈ base + U V` (D²-MoE, Eq. 8 and 10)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from moetool.numerics.work import Work
from moetool.representations.base import Representation, Stored, Weight, empty_parameter
from moetool.representations.measured import NOTHING, Measured, cut
from moetool.representations.operand import Products, factors
from moetool.representations.quantized_low_rank import QuantizedLowRank
from moetool.representations.work import cutting


@dataclass(frozen=True)
class LowRank(Representation):
    """`U [out, rank]` and `V [rank, in]`. Rank 0 stores nothing: the expert's matrix is the base."""

    rank: int
    kind: ClassVar[str] = "low-rank"
    uses_base: ClassVar[bool] = True
    is_cheap: ClassVar[bool] = True
    is_plain: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = ("low-rank:0", "low-rank:1", "low-rank:12")

    @property
    def spec(self) -> str:
        return f"{self.kind}:{self.rank}"

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        if len(arguments) != 1 or not arguments[0].isdigit():
            raise ValueError(f"'{cls.kind}' takes one argument, its rank")
        return cls(rank=int(arguments[0]))

    @classmethod
    def describe(cls, forms: Sequence[Self]) -> list[str]:
        ranks = [form.rank for form in forms if form.rank]
        parts = []
        if ranks:
            least, most = min(ranks), max(ranks)
            several = f" … {most}, mean {sum(ranks) / len(ranks):.0f}" if least < most else ""
            parts = [f"rank {least}{several}"]
        alone = len(forms) - len(ranks)
        return [*parts, f"{alone} × base alone"] if alone else parts

    @property
    def directions(self) -> int:
        return self.rank

    @property
    def factors(self) -> tuple[str, str] | None:
        return ("u", "v") if self.rank else None

    def quantized(self, bits: int, group: int) -> Representation:
        return QuantizedLowRank(self.rank, bits, group) if self.rank else self

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        return {"u": Stored((shape[0], self.rank)), "v": Stored((self.rank, shape[1]))} if self.rank else {}

    def multiplications(self, shape: tuple[int, int]) -> int:
        return self.rank * sum(shape)

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        return super().work(matrix) + cutting(matrix, self.rank)

    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        return dict(zip(("u", "v"), cut(matrix, self.rank, dtype, measured), strict=True)) if self.rank else {}

    def encode_factors(self, u: Tensor, v: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"u": u.to(dtype), "v": v.to(dtype)}

    def decode_factors(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        if not self.rank:
            return None
        return tensors["u"].float(), tensors["v"].float()

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return LowRankWeight(shape, self.rank, dtype, device)


class LowRankWeight(Weight):
    """Run-time form of `LowRank`: two thin products instead of one full one."""

    def __init__(self, shape: tuple[int, int], rank: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape, self.rank = shape, rank
        if rank:
            self.u = empty_parameter((shape[0], rank), dtype, device)
            self.v = empty_parameter((rank, shape[1]), dtype, device)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.rank:
            return inputs.new_zeros(inputs.shape[0], self.shape[0])
        return (inputs @ self.v.T) @ self.u.T

    def dense(self) -> Tensor:
        if not self.rank:
            return torch.zeros(self.shape)
        return self.u.float() @ self.v.float()

    def products(self) -> Products:
        return (factors(self.u, self.v),) if self.rank else ()


def break_even_rank(shape: tuple[int, int]) -> int:
    """The largest rank whose factors are smaller than the matrix `[out, in]` itself: r (out + in) < out · in."""
    rows, columns = shape
    return (rows * columns - 1) // (rows + columns)
