"""What a representation is: one way to store one expert's matrix."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor, nn


class Weight(nn.Module, ABC):
    """One stored matrix at run time: `forward` is its product with inputs, `dense` the matrix it stands for."""

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """`[tokens, in]` → `[tokens, out]`."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The matrix `[out, in]` in fp32 or better."""


class Representation(ABC):
    """How one expert's matrix is stored, as a value that fits into `config.json`.

    A representation either stands for the expert's own matrix, or for its difference to the layer's shared base
    (`uses_base`).
    """

    kind: ClassVar[str]
    uses_base: ClassVar[bool]

    @property
    def spec(self) -> str:
        """Short form for `config.json`, `kind` or `kind:arguments`."""
        return self.kind

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        """Inverse of `spec`. Raises `ValueError` on anything else."""
        if arguments:
            raise ValueError(f"'{cls.kind}' takes no arguments")
        return cls()

    @abstractmethod
    def shapes(self, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Tensors on disk, by name, for a matrix `[out, in]`."""

    @abstractmethod
    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        """An empty `Weight` whose parameters are exactly `shapes(shape)`."""

    def parameters(self, shape: tuple[int, int]) -> int:
        """Stored numbers."""
        return sum(torch.Size(size).numel() for size in self.shapes(shape).values())


def empty_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter, to be filled by a loader."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
