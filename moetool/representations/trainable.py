"""Stored tensors that gradients can move: codes between their levels, and the scales of groups.

A code is kept as a number u on the line of codes, of which the nearest whole number is stored; the gradient of what the
code stands for is taken as that of u times the scale (straight through). In the beginning u lies where the weight is,
within the cell of its code: a weight near a boundary needs little to cross it, and one whose code was chosen to make up
for others' errors lies at the edge of its cell. Scales move by factors. Both by Adam's rule, in which the size of
gradients does not count (Kingma and Ba, arXiv:1412.6980); gradients of roundings and scales: SignRound
(arXiv:2309.05516), EfficientQAT (arXiv:2407.11062).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.numerics.packing import pack, unpack
from moetool.numerics.quantization import is_whole, levels

_EDGE = 0.45  # how far from its code a number begins at most
_MEAN, _SQUARE = 0.9, 0.98  # what Adam keeps of its means at every step
_TINY = 1e-30


@dataclass(frozen=True)
class Pace:
    """Sizes of one optimization step.

    Attributes:
        codes: on the line of codes.
        scales: relative to themselves.
    """

    codes: float
    scales: float


class Trainable(ABC):
    """The stored numbers of one matrix `[out, in]` while gradients move them."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Decode the matrix `[out, in]` fp32 that the numbers would stand for if they were stored now."""

    @abstractmethod
    def step(self, gradient: Tensor, pace: Pace) -> None:
        """Move against the gradient `[out, in]` of a loss in the matrix that `dense` gave last."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, by name, with codes rounded and packed."""


class _Moments:
    """The running means by which Adam makes steps of size one out of gradients."""

    def __init__(self, like: Tensor) -> None:
        self._mean, self._square = torch.zeros_like(like), torch.zeros_like(like)
        self._steps = 0

    def direction(self, gradient: Tensor) -> Tensor:
        """The direction of a step, in which each number moves by about one."""
        self._steps += 1
        self._mean.lerp_(gradient, 1 - _MEAN)
        self._square.mul_(_SQUARE).addcmul_(gradient, gradient, value=1 - _SQUARE)
        size = (self._square / (1 - _SQUARE**self._steps)).sqrt_().add_(_TINY)
        return (self._mean / (1 - _MEAN**self._steps)).div_(size)


class TrainableCodes(Trainable):
    """Codes `[out, in]` of so many bits with a scale per group of inputs."""

    def __init__(
        self, codes: Tensor, scales: Tensor, bits: int, shape: tuple[int, int], matrix: Tensor | None = None
    ) -> None:
        """Packed `codes` and `scales` `[out, groups]` of a matrix of this shape; `matrix` `[out, in]` is what they were
        made of, if it is known."""
        self._bits, self._dtype, self._groups = bits, scales.dtype, scales.shape[1]
        grid = levels(bits, torch.float32, scales.device)
        self._grid = grid[:-1] if is_whole(bits) else grid  # of whole numbers the last code is spare
        whole = unpack(codes, bits, shape[0] * shape[1]).view(shape)
        self._scales = scales.detach().float().clone()
        self._line = whole.float() if matrix is None else self._within(whole, matrix.detach())
        self._moments = _Moments(self._line), _Moments(self._scales)
        self._levels = self._grid  # of the codes as `dense` gave them last, [out, groups, group]

    def _grouped(self, values: Tensor) -> Tensor:
        return values.view(len(values), self._groups, -1)

    def _within(self, codes: Tensor, matrix: Tensor) -> Tensor:
        """Where the matrix itself lies on the line, within the cells of the codes."""
        scales = torch.where(self._scales > 0, self._scales, 1).unsqueeze(2)
        own = codes.long()
        off = (self._grouped(matrix.float()) / scales).view_as(own) - self._grid[own]
        last = len(self._grid) - 1
        gap = torch.where(
            off > 0,
            self._grid[(own + 1).clamp_max(last)] - self._grid[own],
            self._grid[own] - self._grid[(own - 1).clamp_min(0)],
        )
        return codes + (off / torch.where(gap > 0, gap, 1)).clamp_(-_EDGE, _EDGE)

    def _codes(self) -> Tensor:
        return self._line.round().clamp_(0, len(self._grid) - 1).int()

    def _stored_scales(self) -> Tensor:
        return self._scales.to(self._dtype)

    def dense(self) -> Tensor:
        rows, columns = self._line.shape
        self._levels = self._grouped(self._grid.index_select(0, self._codes().view(-1)).view(rows, columns))
        return (self._levels * self._stored_scales().float().unsqueeze(2)).view(rows, columns)

    def step(self, gradient: Tensor, pace: Pace) -> None:
        grouped = self._grouped(gradient)
        line, scales = self._moments
        if pace.scales:
            by_factor = (grouped * self._levels).sum(2).mul_(self._scales)
        self._line.sub_(line.direction((grouped * self._scales.unsqueeze(2)).view_as(gradient)), alpha=pace.codes)
        self._line.clamp_(-_EDGE, len(self._grid) - 1 + _EDGE)
        if pace.scales:
            self._scales.mul_(1 - pace.scales * scales.direction(by_factor))

    def tensors(self) -> dict[str, Tensor]:
        codes = self._codes().to(torch.uint8)
        return {"codes": pack(codes.reshape(-1), self._bits), "scales": self._stored_scales()}


class TrainableScales(Trainable):
    """Stored numbers of a quantized matrix while gradients move its scales; its codes stay as they are."""

    def __init__(self, codes: Tensor, scales: Tensor, values: Tensor) -> None:
        """`scales` `[out, groups]`; `values` `[out, in]` fp32 is what the stored `codes` stand for before scaling."""
        self._codes, self._dtype = codes, scales.dtype
        self._values = values.view(*scales.shape, -1)
        self._scales = scales.detach().float().clone()
        self._moments = _Moments(self._scales)

    def dense(self) -> Tensor:
        scaled = self._values * self._scales.to(self._dtype).float().unsqueeze(2)
        return scaled.view(len(scaled), -1)

    def step(self, gradient: Tensor, pace: Pace) -> None:
        by_factor = (gradient.view_as(self._values) * self._values).sum(2).mul_(self._scales)
        self._scales.mul_(1 - pace.scales * self._moments.direction(by_factor))

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self._codes, "scales": self._scales.to(self._dtype)}


class TrainableFactors(Trainable):
    """`U^T [rank, out]` and `V [rank, in]`, whose product is the matrix."""

    def __init__(self, u: Trainable, v: Trainable) -> None:
        self._u, self._v = u, v
        self._last = torch.empty(0), torch.empty(0)

    def dense(self) -> Tensor:
        self._last = self._u.dense(), self._v.dense()
        return self._last[0].T @ self._last[1]

    def step(self, gradient: Tensor, pace: Pace) -> None:
        u, v = self._last
        self._u.step(v @ gradient.T, pace)
        self._v.step(u @ gradient, pace)

    def tensors(self) -> dict[str, Tensor]:
        parts = {"u": self._u.tensors(), "v": self._v.tensors()}
        return {f"{factor}.{name}": tensor for factor, own in parts.items() for name, tensor in own.items()}
