"""What the inputs of a matrix tell about its codes: their Gram matrix, and its factor."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from moetool.export.blocks.lattice import TOGETHER
from moetool.numerics.error_feedback import correlation_factor, damping_of


@dataclass(frozen=True, eq=False)
class PreparedGram:
    """A Gram matrix prepared for choosing codes, shared by all matrices on the same inputs and by all types.

    Attributes:
        gram: `[in, in]` fp32, in units of the mean energy, damped.
        order: `[in]`, inputs, in eights where 8 divides them, from those that carry most, while many are left to make
            good for their errors.
        factor: `[in, in]` fp32 in that order, the upper triangular R of gram = R R^T.
        damping: `[in]` fp32, what was added to the diagonal of the Gram matrix.
        energy: of an input, in the mean.
        flatness: determinant of the correlation matrix to the power of 1 / in, from 1 where no input tells of another.
    """

    gram: Tensor
    order: Tensor
    factor: Tensor
    damping: Tensor
    energy: float
    flatness: float

    @classmethod
    def of(cls, gram: Tensor) -> Self | None:
        """Prepare a Gram matrix `[in, in]`, the sum of x x^T over inputs x; it may be singular.

        Returns:
            `None` where all inputs are zero: then any error is as good as another.

        Raises:
            ValueError: it is not square, or not finite.
        """
        size = len(gram)
        if gram.shape != (size, size) or not bool(gram.sum().isfinite()):
            raise ValueError(f"codes are chosen by a finite, square Gram matrix, not {list(gram.shape)}")
        energy = gram.diagonal().double().mean().item()
        if not energy > 0:
            return None
        scaled = torch.div(gram, energy, out=torch.empty_like(gram, dtype=torch.float32))
        damping = damping_of(scaled.diagonal())
        scaled.diagonal().add_(damping)
        together = math.gcd(size, TOGETHER)
        first = scaled.diagonal().unflatten(0, (-1, together)).sum(1).argsort(descending=True, stable=True) * together
        order = (first[:, None] + torch.arange(together, device=gram.device)).flatten()
        # With ones on the diagonal no pivot lies below the damping, which fp32 resolves. Backwards: a lower factor of
        # the inputs in reverse is an upper one of the inputs in order.
        back, size_of = order.flip(0), scaled.diagonal().sqrt()
        unit = (1 / size_of)[back]
        correlation = scaled[back][:, back].mul_(unit).mul_(unit[:, None])
        factor, flatness = correlation_factor(correlation)
        factor = factor.flip(0, 1).mul_(size_of[order][:, None]).contiguous()
        return cls(scaled, order, factor, damping, energy, flatness)

    def output_errors(self, errors: Tensor) -> Tensor:
        """Squared error at the output of every row of `errors` `[rows, in]`, `[rows]` fp32, not below zero."""
        found = ((errors @ self.gram) * errors).sum(1) - errors.square() @ self.damping
        return found.clamp_min_(0) * self.energy

    def check(self, inputs: int) -> None:
        """Raise `ValueError` unless these are so many inputs."""
        if len(self.order) != inputs:
            raise ValueError(f"a matrix of {inputs} inputs has no Gram matrix of {len(self.order)}")
