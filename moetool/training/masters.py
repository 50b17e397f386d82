"""What training takes its steps on: fp32 copies of parameters, factors of their blocks, and what is added to them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TINY = 1e-8  # root mean square that counts as one of zero
_ADDED = 5.0  # size of what is added, where all numbers are one, in those of the weight: measured
_LEAST = 0.05  # of a block's factor: one of zero or less is no way for a scale to go


class Master(ABC):
    """Numbers in fp32 by which a parameter of a model is trained.

    Attributes:
        numbers: that the optimizer moves.
    """

    numbers: nn.Parameter

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """A copy of what is to be stored of the parameter as it is now."""

    @abstractmethod
    def set(self, values: Tensor) -> None:
        """Let the model compute with `values`, and go on from there."""

    @abstractmethod
    def give(self) -> None:
        """Let the model compute with these numbers, as they would be stored."""

    @abstractmethod
    def take_gradient(self) -> None:
        """Take over the parameter's gradient as that of `numbers`, and clear it."""


class NumbersMaster(Master):
    """The copy of a parameter, in units of the root mean square of its numbers, so that one rate fits tensors of any
    size."""

    def __init__(self, parameter: Tensor, stored: torch.dtype) -> None:
        own = parameter.detach().float()
        self._parameter, self._size = parameter, own.square().mean().sqrt().clamp_min(_TINY)
        self._dtype = _dtype_of(own, stored)
        self.numbers = nn.Parameter(own / self._size)

    @property
    def values(self) -> Tensor:
        return self._parameter.detach().clone()

    @torch.no_grad()
    def set(self, values: Tensor) -> None:
        self._parameter.copy_(values)
        self.numbers.copy_(self._parameter.float() / self._size)

    @torch.no_grad()
    def give(self) -> None:
        self._parameter.copy_((self.numbers * self._size).to(self._dtype))

    @torch.no_grad()
    def take_gradient(self) -> None:
        gradient, self._parameter.grad = self._parameter.grad, None
        self.numbers.grad = None if gradient is None else gradient.float() * self._size


class WeightChange(Master):
    """Numbers by which the model changes a weight, which itself stays as it is, whenever it computes with it."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = nn.Parameter(numbers)

    @abstractmethod
    def made(self, weight: Tensor) -> Tensor:
        """What the model computes with in place of a weight. Gradients reach the numbers through it."""

    @property
    def values(self) -> Tensor:
        return self.numbers.detach().clone()

    @torch.no_grad()
    def set(self, values: Tensor) -> None:
        self.numbers.copy_(values)

    def give(self) -> None:
        """The model computes with these numbers themselves."""

    def take_gradient(self) -> None:
        """Gradients are those of these numbers."""


class BlockFactors(WeightChange):
    """Factors of a matrix's blocks, each of so many numbers that follow each other among the inputs of one output: of
    `[…, out, in]` there are `[…, out, in / block]`."""

    def __init__(self, weight: Tensor, block: int, device: torch.device, *, is_transposed: bool = False) -> None:
        """Of a matrix or several `[…, out, in]`; `[…, in, out]` if `is_transposed`."""
        *several, out, inputs = (weight.mT if is_transposed else weight).shape
        super().__init__(torch.ones(*several, out, inputs // block, device=device))
        self._block, self._is_transposed = block, is_transposed

    def made(self, weight: Tensor) -> Tensor:
        if self._is_transposed:
            return (weight.unflatten(-2, (-1, self._block)) * self.numbers.mT.unsqueeze(-2)).flatten(-3, -2)
        return (weight.unflatten(-1, (-1, self._block)) * self.numbers.unsqueeze(-1)).flatten(-2)

    @torch.no_grad()
    def give(self) -> None:
        self.numbers.clamp_(min=_LEAST)


class LowRankUpdate(WeightChange):
    """A product of two thin matrices that is added to a weight (LoRA, arXiv:2106.09685).

    A weight `[…, rows, columns]` has `[…, rank, columns]`, random, and `[…, rank, rows]`, zero at first, in one
    tensor. Both are trained.

    Attributes:
        stored: the dtype to whose numbers the sum is rounded; `None` if it is not.
    """

    def __init__(self, right: Tensor, rows: int, scale: float, stored: torch.dtype | None = None) -> None:
        """Of a matrix, or several in one tensor, of so many rows; the product counts `scale` times. The model computes
        with the sum as it is `stored`, if that is told."""
        super().__init__(torch.cat([right, right.new_zeros(*right.shape[:-1], rows)], -1))
        self._columns, self._scale, self.stored = right.shape[-1], scale, stored

    @classmethod
    def of(cls, weight: Tensor, rank: int, stored: torch.dtype, stream: torch.Generator) -> Self:
        """Of a weight that is `stored` in a dtype where that holds it, in units of the root mean square of its
        numbers."""
        *several, rows, columns = weight.shape
        right = torch.randn(*several, rank, columns, generator=stream).to(weight.device)
        size = float(weight.detach().square().mean().sqrt().clamp_min(_TINY))
        return cls(right, rows, _ADDED * size / math.sqrt(rank), _dtype_of(weight.detach(), stored))

    def made(self, weight: Tensor) -> Tensor:
        right, left = self.numbers.split([self._columns, self.numbers.shape[-1] - self._columns], -1)
        left, right = left.mT.to(weight.dtype), (right * self._scale).to(weight.dtype)
        with torch.autocast(weight.device.type, enabled=False):
            made = torch.baddbmm(*(each.reshape(-1, *each.shape[-2:]) for each in (weight, left, right)))
        made = made.view_as(weight)
        return made if self.stored is None else _Stored.apply(made, self.stored)


class _Stored(torch.autograd.Function):
    """Numbers as a dtype holds them, on the way back as if they were themselves."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return numbers.to(dtype).to(numbers.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _dtype_of(numbers: Tensor, stored: torch.dtype) -> torch.dtype:
    """The dtype in which numbers are stored: a coarser one only if it holds them exactly."""
    return stored if numbers.to(stored).to(numbers.dtype).equal(numbers) else torch.float32


class Blocks(NamedTuple):
    """A parameter of a model, and its blocks.

    Attributes:
        weight: the parameter, `[…, out, in]`; anything else has no blocks.
        block: numbers of inputs in a block; `None` where there are none that could be multiplied.
        is_transposed: whether the parameter lies as `[…, in, out]`.
    """

    weight: object
    block: int | None
    is_transposed: bool = False


def block_factors(model: "PreTrainedModel", found: Iterable[Blocks]) -> dict[str, BlockFactors]:
    """Factors of the blocks of a model's parameters, by the names of these; of one that is found twice once."""
    names, made = {id(parameter): name for name, parameter in model.named_parameters()}, dict[str, BlockFactors]()
    for weight, block, is_transposed in found:
        if block is not None and isinstance(weight, nn.Parameter) and (name := names[id(weight)]) not in made:
            made[name] = BlockFactors(weight, block, model.device, is_transposed=is_transposed)
    return made


def copies(parameters: Mapping[str, Tensor], stored: torch.dtype) -> dict[str, Master]:
    """Masters of parameters by their names, which are stored in a dtype where that holds them."""
    return {name: NumbersMaster(parameter, stored) for name, parameter in parameters.items()}
