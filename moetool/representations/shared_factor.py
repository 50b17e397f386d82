"""Low-rank deltas of which all experts have one factor in common (D²-MoE, Appendix A.6).

`shared-v`: `W_e ≈ base + U_e V`, what every expert looks at in its input. `shared-u`: `W_e ≈ base + U V_e`, what every
expert can change in its output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from moetool.numerics.work import Work
from moetool.representations.base import Representation, Stored, Weight, empty_parameter
from moetool.representations.measured import NOTHING, Measured, cut
from moetool.representations.operand import Products, factors
from moetool.representations.work import cutting


@dataclass(frozen=True)
class _SharedFactor(Representation):
    rank: int
    own: ClassVar[str]
    common: ClassVar[str]
    axis: ClassVar[int]  # along which the matrices of all experts are one
    uses_base: ClassVar[bool] = True
    is_cheap: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return f"{self.kind}:{self.rank}"

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        if len(arguments) != 1 or not arguments[0].isdigit() or not int(arguments[0]):
            raise ValueError(f"'{cls.kind}' takes one argument, its rank")
        return cls(rank=int(arguments[0]))

    @property
    def directions(self) -> int:
        return self.rank

    def _factors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        return {"u": Stored((shape[0], self.rank)), "v": Stored((self.rank, shape[1]))}

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        return {self.own: self._factors(shape)[self.own]}

    def shared_tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        return {self.common: self._factors(shape)[self.common]}

    def multiplications(self, shape: tuple[int, int]) -> int:
        return self.rank * sum(shape)

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        return super().work(matrix) + cutting(matrix, self.rank)

    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        """Encode the matrix of a layer's only expert."""
        common, [own] = self.encode_jointly([matrix], dtype, measured)
        return common | own

    def encode_jointly(
        self, matrices: Sequence[Tensor], dtype: torch.dtype, measured: Measured = NOTHING
    ) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """`measured` is about all matrices at once, below each other for a shared V and beside each other for a shared
        U."""
        factors = dict(zip("uv", cut(torch.cat(list(matrices), self.axis), self.rank, dtype, measured), strict=True))
        own = factors[self.own].chunk(len(matrices), self.axis)
        return {self.common: factors[self.common]}, [{self.own: factor.contiguous()} for factor in own]

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return SharedFactorWeight(self.own, self.tensors(shape)[self.own].shape, dtype, device)


class SharedV(_SharedFactor):
    """Low-rank deltas of one role that have their right factor in common: `U_e [out, rank]` per expert, one `V [rank,
    in]`."""

    kind: ClassVar[str] = "shared-v"
    own: ClassVar[str] = "u"
    common: ClassVar[str] = "v"
    axis: ClassVar[int] = 0
    examples: ClassVar[tuple[str, ...]] = ("shared-v:3",)


class SharedU(_SharedFactor):
    """Low-rank deltas of one role that have their left factor in common: one `U [out, rank]`, `V_e [rank, in]` per
    expert."""

    kind: ClassVar[str] = "shared-u"
    own: ClassVar[str] = "v"
    common: ClassVar[str] = "u"
    axis: ClassVar[int] = 1
    examples: ClassVar[tuple[str, ...]] = ("shared-u:3",)


class SharedFactorWeight(Weight):
    """One expert's matrix of `SharedV` or `SharedU` at run time: it owns its factor and refers to the common one."""

    def __init__(self, own: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._own = own
        self.register_parameter(own, empty_parameter(shape, dtype, device))
        # In a tuple, so that the shared parameter is not registered here a second time.
        self._shared: tuple[Mapping[str, Tensor] | nn.ParameterDict, ...] = ()

    def share(self, tensors: Mapping[str, Tensor] | nn.ParameterDict) -> None:
        self._shared = (tensors,)

    def _factor(self, name: str) -> Tensor:
        return getattr(self, name) if name == self._own else self._shared[0][name]

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs @ self._factor("v").T) @ self._factor("u").T

    def dense(self) -> Tensor:
        return self._factor("u").float() @ self._factor("v").float()

    def products(self) -> Products:
        return (factors(self._factor("u"), self._factor("v")),)
