"""A delta to the shared base as a product of two thin matrices, each quantized."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from moetool.numerics.factorize import balancing_powers, refit, unit_columns
from moetool.numerics.precision import fp32_products_are_exact
from moetool.numerics.work import Work, altogether
from moetool.representations.base import NestedFactors, Representation, Stored, Weight
from moetool.representations.measured import NOTHING, Measured, cut
from moetool.representations.operand import Products
from moetool.representations.quantized import (
    ROW,
    Quantized,
    QuantizedWeight,
    check_quantization,
    fitting_group,
    parse_quantization,
)
from moetool.representations.trainable import TrainableFactors


@dataclass(frozen=True)
class QuantizedLowRank(Representation):
    """`U^T [rank, out]` and `V [rank, in]`, quantized along their long sides. Rank 0 stores nothing.

    Groups run along the outputs in U and along the inputs in V, so every direction has scales of its own. How a
    singular value is split between the two changes no code, but scales are stored in 16 bits, and trained: each gets
    its root. The groups of V may have another size (`input_group`).
    """

    rank: int
    bits: int
    group: int
    input_group: int | None = None
    kind: ClassVar[str] = "quantised-low-rank"
    uses_base: ClassVar[bool] = True
    is_cheap: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = (
        "quantised-low-rank:0:4:8",
        "quantised-low-rank:8:4:12:16",
        "quantised-low-rank:5:3:row",
    )

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"a rank cannot be {self.rank}")
        if self.input_group == self.group:
            object.__setattr__(self, "input_group", None)  # one form has one spec
        check_quantization(self.bits, self.group)
        check_quantization(self.bits, self.v.group)

    @property
    def spec(self) -> str:
        other = "" if self.input_group is None else f":{self.input_group or ROW}"
        return f"{self.kind}:{self.rank}:{self.bits}:{self.group or ROW}{other}"

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        if len(arguments) not in (3, 4) or not arguments[0].isdigit():
            raise ValueError(
                f"'{cls.kind}' takes three arguments, its rank, bits and group size (or '{ROW}'), and a fourth if V's "
                "groups are of another size"
            )
        rank, bits, *groups = arguments
        parsed = [parse_quantization(bits, group) for group in groups]
        return cls(int(rank), parsed[0][0], *(group for _, group in parsed))

    @classmethod
    def describe(cls, forms: Sequence[Self]) -> list[str]:
        ranks: dict[int, list[int]] = {}
        for form in forms:
            ranks.setdefault(form.bits, []).append(form.rank)
        parts = []
        for bits, own in sorted(ranks.items()):
            span = f"{min(own)} … {max(own)}" if min(own) < max(own) else f"{own[0]}"
            parts.append(f"{len(own)} × rank {span} in {bits} bits")
        return parts

    @property
    def directions(self) -> int:
        return self.rank

    def fitted(self, shape: tuple[int, int]) -> Self:
        rows, columns = shape
        return replace(self, group=fitting_group(self.u.group, rows), input_group=fitting_group(self.v.group, columns))

    @property
    def u(self) -> Quantized:
        """The quantized form in which the transposed left factor Uᵀ `[rank, out]` is stored."""
        return Quantized(self.bits, self.group)

    @property
    def v(self) -> Quantized:
        """The quantized form in which the right factor V `[rank, in]` is stored, in groups of its own if they are
        named."""
        return Quantized(self.bits, self.group if self.input_group is None else self.input_group)

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        rows, columns = shape
        factors = {"u": self.u.tensors((self.rank, rows)), "v": self.v.tensors((self.rank, columns))}
        return {
            f"{factor}.{name}": stored for factor, own in factors.items() for name, stored in own.items() if self.rank
        }

    def counted_parameters(self, shape: tuple[int, int]) -> float:
        return self.rank * sum(shape) * self.bits / 16

    def multiplications(self, shape: tuple[int, int]) -> int:
        return self.rank * sum(shape)

    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        """U is quantized first and V is the least-squares solution against the quantized U, whatever the whitening: see
        `numerics.factorize.truncate`, which does the same for rounding. Scales are in `dtype`; U is nearly orthogonal,
        so its rows' errors add up, and the codes of V make up for each other's as those of full matrices do."""
        if not self.rank:
            return {}
        basis = cut(matrix, self.rank, torch.float32, measured)[0] if measured.basis is None else measured.basis
        rows = len(matrix)
        if basis.shape[0] != rows or basis.shape[1] < self.rank:
            raise ValueError(f"the basis must be [{rows}, {self.rank}] or wider, got {list(basis.shape)}")
        u = self.encode_u(basis, dtype)
        work = torch.float32 if fp32_products_are_exact() else torch.float64
        exact = self.u.decode(u, (self.rank, rows), dtype).T.to(work)
        target, counted, norm = matrix.detach().to(work), exact, measured.norm
        if norm is not None:
            target, counted = norm.times(target), norm.times(exact)
        v = refit(target, counted)
        powers = balancing_powers(exact.double(), v)[:, None]
        u["scales"] = (u["scales"].double() * powers).to(dtype)
        v /= powers
        # The rows of V are directions, not the matrix's.
        tensors = {"u": u, "v": self.v.encode(v, dtype, replace(measured, outputs=None))}
        return {f"{factor}.{name}": tensor for factor, part in tensors.items() for name, tensor in part.items()}

    @property
    def nested(self) -> NestedFactors | None:
        return NestedFactors(self._stored_u, self.v) if self.rank else None

    def _stored_u(self, basis: Tensor, dtype: torch.dtype) -> Tensor:
        """The U `[out, rank]` that is stored for a basis `[out, k]`."""
        return self.u.decode(self.encode_u(basis, dtype), (self.rank, len(basis)), dtype).T

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        rows, columns = matrix
        factors = [self.u.work((rows, self.rank)), self.v.work((self.rank, columns))]
        return super().work(matrix) + altogether(factors) + Work(products={"float32": 2 * rows * columns * self.rank})

    def encode_u(self, basis: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """U^T for a basis [out, k] of at least `rank` columns, of root mean squares near 1; every direction by itself,
        so that smaller ranks have the same ones."""
        return self.u.encode(unit_columns(basis[:, : self.rank]).T.contiguous(), dtype)

    def encode_factors(self, u: Tensor, v: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = {"u": self.u.encode(u.T.contiguous(), dtype), "v": self.v.encode(v, dtype)}
        return {f"{factor}.{name}": tensor for factor, part in tensors.items() for name, tensor in part.items()}

    def decode_factors(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        if not self.rank:
            return None
        u, v = (
            form.decode({name: tensors[f"{factor}.{name}"] for name in form.tensors(own)}, own, dtype).float()
            for factor, form, own in (("u", self.u, (self.rank, shape[0])), ("v", self.v, (self.rank, shape[1])))
        )
        return u.T.contiguous(), v

    def trainable(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], matrix: Tensor | None = None
    ) -> TrainableFactors | None:
        if not self.rank:
            return None
        rows, columns = shape
        part = {name: {key: tensors[f"{name}.{key}"] for key in ("codes", "scales")} for name in ("u", "v")}
        return TrainableFactors(
            self.u.trainable(part["u"], (self.rank, rows)), self.v.trainable(part["v"], (self.rank, columns))
        )

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return QuantizedLowRankWeight(self, shape, dtype, device)


class QuantizedLowRankWeight(Weight):
    """Run-time form of `QuantizedLowRank`: dequantizes the thin matrices and multiplies by one after the other."""

    u: QuantizedWeight
    v: QuantizedWeight

    def __init__(
        self, representation: QuantizedLowRank, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.shape, self.rank = shape, representation.rank
        if self.rank:
            self.u = QuantizedWeight(representation.u, (self.rank, shape[0]), dtype, device)
            self.v = QuantizedWeight(representation.v, (self.rank, shape[1]), dtype, device)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.rank:
            return inputs.new_zeros(inputs.shape[0], self.shape[0])
        return self.u(self.v(inputs), transposed=True)

    def dense(self) -> Tensor:
        return self.u.dense().T @ self.v.dense() if self.rank else torch.zeros(self.shape)

    def products(self) -> Products:
        return ((self.v.operand(), self.u.operand(transposed=True)),) if self.rank else ()
