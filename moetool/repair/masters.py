"""What a repair takes its steps on: fp32 copies of a model's parameters, and factors of blocks of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

_LEAST = 0.05  # of a block's factor: one of zero or less is no way for a scale to go


class Master(ABC):
    """Numbers in fp32 by which a parameter of a model is trained.

    Attributes:
        numbers: that the optimizer moves, all of them about one in size, so that one rate fits tensors of any size.
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
    """The copy of a parameter, in units of the root mean square of its numbers."""

    def __init__(self, parameter: Tensor, stored: torch.dtype) -> None:
        own = parameter.detach().float()
        self._parameter, self._size = parameter, own.square().mean().sqrt().clamp_min(1e-8)
        # Numbers that a coarser dtype holds exactly are stored in it.
        self._dtype = stored if own.to(stored).float().equal(own) else torch.float32
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


class BlockFactors(Master):
    """Factors of a matrix's blocks, each of so many numbers that follow each other among the inputs of one output.

    The matrix stays what it was times these: of `[…, out, in]` there are `[…, out, in / block]`. Its own gradient, as
    large as itself, is summed as soon as it is there.
    """

    def __init__(self, parameter: Tensor, block: int, *, is_transposed: bool = False) -> None:
        """Of a matrix or several `[…, out, in]`; `[…, in, out]` if `is_transposed`."""
        self._parameter, self._block, self._is_transposed = parameter.requires_grad_(True), block, is_transposed
        blocks = self._blocks(parameter.detach())
        self._held = torch.ones(blocks.shape[:-1], device=parameter.device)
        self._gradient = torch.zeros_like(self._held)
        self.numbers = nn.Parameter(self._held.clone())
        parameter.register_post_accumulate_grad_hook(self._sum)

    def _blocks(self, tensor: Tensor) -> Tensor:
        """View of a tensor like the parameter, `[…, out, blocks, numbers]`."""
        return (tensor.mT if self._is_transposed else tensor).unflatten(-1, (-1, self._block))

    @torch.no_grad()
    def _sum(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        moved = self._blocks(parameter.grad) * self._blocks(parameter)
        self._gradient += moved.sum(-1) / self._held
        parameter.grad = None

    @property
    def values(self) -> Tensor:
        return self._held.clone()

    @torch.no_grad()
    def set(self, values: Tensor) -> None:
        self._blocks(self._parameter).mul_((values / self._held).unsqueeze(-1))
        self._held.copy_(values)
        self.numbers.copy_(values)

    def give(self) -> None:
        self.set(self.numbers.detach().clamp_min(_LEAST))

    @torch.no_grad()
    def take_gradient(self) -> None:
        self.numbers.grad, self._gradient = self._gradient, torch.zeros_like(self._gradient)


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


def block_factors(model: nn.Module, found: Iterable[Blocks]) -> dict[str, BlockFactors]:
    """Factors of the blocks of a model's parameters, by the names of these; of one that is found twice once."""
    names, made = {id(parameter): name for name, parameter in model.named_parameters()}, dict[str, BlockFactors]()
    for weight, block, is_transposed in found:
        if block is not None and isinstance(weight, nn.Parameter) and (name := names[id(weight)]) not in made:
            made[name] = BlockFactors(weight, block, is_transposed=is_transposed)
    return made


def copies(parameters: Mapping[str, Tensor], stored: torch.dtype) -> dict[str, Master]:
    """Masters of parameters by their names, which are stored in a dtype where that holds them."""
    return {name: NumbersMaster(parameter, stored) for name, parameter in parameters.items()}
