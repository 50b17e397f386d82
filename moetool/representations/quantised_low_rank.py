"""A difference to the shared base as a product of two thin matrices, each in few bits."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from moetool.numerics.factorize import refit
from moetool.representations.base import Representation, Stored, Weight
from moetool.representations.quantised import (
    ROW,
    Quantised,
    QuantisedWeight,
    check_quantisation,
    parse_quantisation,
)


@dataclass(frozen=True)
class QuantisedLowRank(Representation):
    """`U^T [rank, out]` and `V [rank, in]`, quantised along their long sides. Rank 0 stores nothing.

    Groups run along the outputs in U and along the inputs in V, so every direction has scales of its own and how a
    singular value is split between the two does not matter.
    """

    rank: int
    bits: int
    group: int
    kind: ClassVar[str] = "quantised-low-rank"
    uses_base: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"a rank cannot be {self.rank}")
        check_quantisation(self.bits, self.group)

    @property
    def spec(self) -> str:
        return f"{self.kind}:{self.rank}:{self.bits}:{self.group or ROW}"

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        if len(arguments) != 3 or not arguments[0].isdigit():
            raise ValueError(f"'{cls.kind}' takes three arguments, its rank, bits and group size (or '{ROW}')")
        return cls(int(arguments[0]), *parse_quantisation(*arguments[1:]))

    @property
    def _factor(self) -> Quantised:
        return Quantised(self.bits, self.group)

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        return {
            f"{factor}.{name}": stored
            for factor, length in zip(("u", "v"), shape, strict=True)
            for name, stored in self._factor.tensors((self.rank, length)).items()
            if self.rank
        }

    def counted_parameters(self, shape: tuple[int, int]) -> float:
        return self.rank * sum(shape) * self.bits / 16

    def encode(
        self,
        delta: Tensor,
        dtype: torch.dtype,
        *,
        basis: Tensor,
        row_scale: Tensor | None = None,
        importance: Tensor | None = None,
        gram: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """What is stored of `delta` [out, in] in a model of `dtype`.

        U is quantised first and V is the least-squares solution against the quantised U, whatever the whitening: see
        `numerics.factorize.truncate`, which does the same for rounding.

        Args:
            delta: [out, in], or the product of factors that are to be quantised.
            dtype: of the scales.
            basis: [out, rank], columns that span what U should span, e.g. U from `truncate` in fp32.
            row_scale: [out], positive, how much each output counts.
            importance: [in], how much the squared error of each input counts.
            gram: [in, in], for V, as in `Quantised.encode`; U is nearly orthogonal, so its rows' errors add up.

        Raises:
            ValueError: shapes do not fit, or values are not finite.
        """
        rows, _ = delta.shape
        if basis.shape != (rows, self.rank):
            raise ValueError(f"the basis must be [{rows}, {self.rank}], got {list(basis.shape)}")
        if not self.rank:
            return {}
        u = self._factor.encode(basis.T.contiguous(), dtype)
        exact = self._factor.decode(u, (self.rank, rows), dtype).T.double()
        scale = 1.0 if row_scale is None else row_scale.double()[:, None]
        v = refit(scale * delta.detach().double(), scale * exact)
        tensors = {"u": u, "v": self._factor.encode(v, dtype, importance=importance, gram=gram)}
        return {f"{factor}.{name}": tensor for factor, part in tensors.items() for name, tensor in part.items()}

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return QuantisedLowRankWeight(self, shape, dtype, device)


class QuantisedLowRankWeight(Weight):
    """Run-time form of `QuantisedLowRank`: dequantises the thin matrices and multiplies by one after the other."""

    u: QuantisedWeight
    v: QuantisedWeight

    def __init__(
        self, representation: QuantisedLowRank, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.shape, self.rank = shape, representation.rank
        if self.rank:
            factor = Quantised(representation.bits, representation.group)
            self.u = QuantisedWeight(factor, (self.rank, shape[0]), dtype, device)
            self.v = QuantisedWeight(factor, (self.rank, shape[1]), dtype, device)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.rank:
            return inputs.new_zeros(inputs.shape[0], self.shape[0])
        return self.u(self.v(inputs), transposed=True)

    def dense(self) -> Tensor:
        return self.u.dense().T @ self.v.dense() if self.rank else torch.zeros(self.shape)
