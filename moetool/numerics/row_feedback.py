"""Rows of a matrix that are coded one after the other, each making good for the errors of those before it.

What the loss sees of errors E [out, in] in a matrix is about tr(H E G E^T), with the Gram matrix G of its inputs and
the second moment H [out, out] of the loss's gradients at its outputs (K-FAC, arXiv:1503.05671). Error feedback by G
alone (`numerics.error_feedback`) codes every row by itself. With H = S D S^T, S upper triangular with ones on its
diagonal, the loss is

    sum_i D_i |e_i + sum_(k<i) S_ki e_k|_G²,

so that row i should come near to w_i + sum_(k<i) S_ki e_k, whatever it is coded in (YAQA, arXiv:2505.22988). Of a small
trained Mixtral D_i is .2 to .5 of H_ii in the geometric mean: as much is left of the loss.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

LINKED_ROWS = 2048  # rows between which errors are moved: the time for S grows by the cube of it
# What a row makes good for makes its numbers larger, and with them its own errors, the more, the fewer bits it has. At
# 1 bit, without such damping, metrics whose rows tell much of each other lost more with feedback than without.
_PER_NOISE = 4.0
LEAST_ROWS = 16  # that are coded together, without feedback among them
_PARTS = 64  # in which the rows of large matrices are coded


class Among(NamedTuple):
    """How some rows that are coded together move each other.

    Attributes:
        links: S, [rows, rows] fp32, upper triangular with ones on its diagonal.
        pivots: D, [rows] fp32, in any unit.
    """

    links: Tensor
    pivots: Tensor


class RowMetric(Protocol):
    """The second moment of the loss's gradients at a matrix's outputs, by which errors in its rows count together."""

    def among(self, rows: Tensor) -> Tensor:
        """The second moment of the gradients at the outputs of some `rows` [n] int64, in their order, damped so that
        it is positive definite: [n, n] fp32."""


class RowFeedback:
    """The errors of the rows that are coded, on their way to those that are not."""

    def __init__(self, metric: RowMetric, order: Tensor, matrix: Tensor, noise: Tensor) -> None:
        """Take the rows of a matrix.

        Args:
            metric: of its rows.
            order: [out] int64, in which they will be coded.
            matrix: [out, in] fp32.
            noise: [out], in this order, share of a number's energy that its code leaves.
        """
        self._metric, self._order, self._matrix, self._noise = metric, order, matrix, noise
        self._done = 0
        self._links = matrix.new_empty(0, 0)
        self._pivots = matrix.new_empty(0)
        self._errors = matrix.new_empty(0, 0)

    def blocks(self, count: int, least: int) -> list[int]:
        """The numbers of rows that are coded together, without feedback among them, of the next `count`
        (`rows_together`)."""
        step, found = rows_together(len(self._order), least), list[int]()
        while count:
            left = LINKED_ROWS - (self._done + sum(found)) % LINKED_ROWS  # a block lies in one chunk
            found.append(min(step, count, left))
            count -= found[-1]
        return found

    def coming(self, count: int) -> Tensor:
        """Return the next rows of the matrix as they are, before errors are moved to them: [count, in] fp32."""
        return self._matrix[self._order[self._done : self._done + count]]

    def target(self, count: int) -> Tensor:
        """What the next rows should come near to all together, so that nothing is left of the errors of those before:
        [count, in] fp32."""
        start = self._done % LINKED_ROWS
        if start == 0:
            self._open()
        rows = self.coming(count)
        near = slice(start, min(start + count, LINKED_ROWS))  # those that lie in the chunk
        left = self._links[:start, near].T @ self._errors[:start]
        among = self._links[near, near]
        rows[: len(among)] += torch.linalg.solve_triangular(among.T, left, upper=False, unitriangular=True)
        return rows

    def among(self, count: int) -> Among:
        """How the next rows move each other, after `target` has given them; those of another chunk do not."""
        start = self._done % LINKED_ROWS
        near = slice(start, min(start + count, len(self._pivots)))
        pivots = self._pivots[near] / self._pivots.mean()
        links = torch.eye(count, device=pivots.device)
        links[: len(pivots), : len(pivots)] = self._links[near, near]
        return Among(links, torch.cat([pivots, pivots.mean().expand(count - len(pivots))]))

    def add(self, coded: Tensor) -> None:
        """Take what the next rows of the matrix [count, in] have become, whose errors then move those behind them."""
        start = self._done % LINKED_ROWS
        torch.sub(self.coming(len(coded)), coded, out=self._errors[start : start + len(coded)])
        self._done += len(coded)

    def leave_out(self, count: int) -> None:
        """Take the next rows of the matrix as zeros, which is what rows without codes become."""
        for size in self.blocks(count, count):
            self.add(torch.zeros_like(self.target(size)))

    def _open(self) -> None:
        rows = self._order[self._done : self._done + LINKED_ROWS]
        moment = self._metric.among(rows)
        moment.diagonal().mul_(1 + _PER_NOISE * self._noise[self._done : self._done + LINKED_ROWS].to(moment))
        self._links, self._pivots = upper_links(moment)
        self._errors = self._matrix.new_empty(len(rows), self._matrix.shape[1])


def rows_together(rows: int, least: int) -> int:
    """How many rows of a matrix are coded together: `least`, or more of one with many rows."""
    return max(least, rows // _PARTS // 8 * 8)


def upper_links(moment: Tensor) -> Among:
    """S and D of a positive definite H = S D S^T [n, n]."""
    factor = torch.linalg.cholesky(moment.flip(0, 1)).flip(0, 1)
    return Among(factor / factor.diagonal(), factor.diagonal().square())
