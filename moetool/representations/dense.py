"""A matrix that is stored whole, in the dtype of the model.

Also what is kept when factors would cost as many bytes as the matrix: the expert's own weight takes the same room as
its delta to the base and is exact, where the difference of two bf16 numbers usually is not a bf16 number.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.representations.base import Representation, Stored, Weight, empty_parameter
from moetool.representations.measured import NOTHING, Measured
from moetool.representations.operand import Products, numbers
from moetool.representations.quantized import Quantized


@dataclass(frozen=True)
class Dense(Representation):
    """Stores a matrix `[out, in]` whole, in the dtype of the model: no delta to a base, and nothing lost."""

    kind: ClassVar[str] = "dense"
    uses_base: ClassVar[bool] = False
    is_cheap: ClassVar[bool] = True
    is_whole: ClassVar[bool] = True
    is_plain: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = ("dense",)

    @property
    def doubtful_error(self) -> float:
        return 0.0

    def quantized(self, bits: int, group: int) -> Representation:
        return Quantized(bits, group)

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        return {"matrix": Stored(shape)}  # not "weight": some families rename "gate.weight" as they load

    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        return {"matrix": matrix.detach().to(dtype)}

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return DenseWeight(shape, dtype, device)


class DenseWeight(Weight):
    """A matrix `[out, in]` that is stored whole, at run time: one parameter in the dtype of the model."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.matrix = empty_parameter(shape, dtype, device)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.matrix)

    def dense(self) -> Tensor:
        return self.matrix

    def products(self) -> Products:
        return ((numbers(self.matrix),),)
