"""Norms of errors at a matrix's outputs, in which it is cut to low rank.

Errors E [out, in] count as ‖R E‖², as if H = R^T R were the second moment of the loss's gradients at the outputs
(K-FAC, arXiv:1503.05671). The best factors U V of R W in a norm of the inputs give those of W, R^-1 U and V.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from moetool.numerics.row_feedback import LINKED_ROWS, RowMetric


class OutputNorm(Protocol):
    """A norm of errors E [out, in] at the outputs of a matrix, ‖R E‖ with an invertible R [out, out]."""

    def times(self, matrix: Tensor) -> Tensor:
        """R M for M [out, n], on its device and in its dtype."""

    def undone(self, matrix: Tensor) -> Tensor:
        """R^-1 M for M [out, n], on its device and in its dtype."""

    def relative(self) -> "OutputNorm":
        """The same norm in a unit in which the largest number on R's diagonal is 1."""

    def counts(self) -> Tensor:
        """How much the squared error of each output counts by itself: the diagonal of H, [out]."""


@dataclass(frozen=True, eq=False)
class ChannelNorm:
    """A norm in which each output counts by itself: R is the diagonal matrix of `scale` [out], positive."""

    scale: Tensor

    @classmethod
    def of(cls, scale: Tensor | None) -> Self | None:
        """The norm of a scale [out]; `None`, the plain norm, without one."""
        return None if scale is None else cls(scale)

    def times(self, matrix: Tensor) -> Tensor:
        return self.scale.to(matrix)[:, None] * matrix

    def undone(self, matrix: Tensor) -> Tensor:
        return matrix / self.scale.to(matrix)[:, None]

    def relative(self) -> "ChannelNorm":
        return ChannelNorm(self.scale / self.scale.amax() if bool(self.scale.any()) else torch.ones_like(self.scale))

    def counts(self) -> Tensor:
        return self.scale.square()


@dataclass(frozen=True, eq=False)
class LinkedNorm:
    """A norm in which errors of outputs count together.

    Attributes:
        blocks: along the diagonal of R, [n, n] fp32, upper triangular, n at most `row_feedback.LINKED_ROWS`.
    """

    blocks: tuple[Tensor, ...]

    @classmethod
    def of(cls, metric: RowMetric, rows: int, device: torch.device) -> Self:
        """The norm of all `rows` of a matrix in a metric. Rows that are far from each other do not count together."""
        parts = torch.arange(rows, device=device).split(LINKED_ROWS)
        return cls(tuple(torch.linalg.cholesky(metric.among(part)).T for part in parts))

    def like(self, other: OutputNorm) -> "LinkedNorm":
        """The same norm in a unit in which all outputs together count as much as in another."""
        share = float(other.counts().double().sum() / self.counts().double().sum())
        return LinkedNorm(tuple(block * share**0.5 for block in self.blocks))

    def _parts(self, matrix: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = matrix.split([len(block) for block in self.blocks])
        return [(block.to(matrix), part) for block, part in zip(self.blocks, parts, strict=True)]

    def times(self, matrix: Tensor) -> Tensor:
        return torch.cat([block @ part for block, part in self._parts(matrix)])

    def undone(self, matrix: Tensor) -> Tensor:
        return torch.cat(
            [torch.linalg.solve_triangular(block, part, upper=True) for block, part in self._parts(matrix)]
        )

    def relative(self) -> "LinkedNorm":
        largest = max(float(block.diagonal().amax()) for block in self.blocks)
        return LinkedNorm(tuple(block / largest for block in self.blocks))

    def counts(self) -> Tensor:
        return torch.cat([block.square().sum(0) for block in self.blocks])
