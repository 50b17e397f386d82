"""Codes chosen one input after the other, each making good for the errors of those before it.

Nearest codes minimise the error of every element by itself. What counts is the error of the output,
tr(E G E^T) for E [out, in] and the Gram matrix G of the inputs, in which errors of correlated inputs can cancel. As in
GPTQ (Frantar et al., arXiv:2210.17323), the error of input j is moved to the inputs that are still open by its least
squares solution.

GPTQ reads that from the Cholesky factor of G^-1. With G = R R^T for an upper R no inverse is needed: the error of a row
e is |e R|^2, whose part k holds the errors of inputs 0 to k alone, so the code of input k makes e_k + sum_(i<k) e_i
R_ik / R_kk as small as it can. That is the same choice (Chen et al., arXiv:2507.18553), and |e R|^2 falls out of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from moetool.numerics.compiled_rounding import CompiledRounding
from moetool.numerics.quantization import Lookup, dequantize, nearest_codes

DAMPING = 0.01  # of every input's own energy: relative to the mean it would drown ordinary inputs beside outliers
_SILENT = 1e-6  # share of the mean energy that inputs without any are given
_BLOCK = 32  # inputs between which errors are moved one by one; beyond, by products of matrices
_SLABS = 4  # in which errors of nearest codes are summed up


@dataclass(frozen=True, eq=False)
class Feedback:
    """A Gram matrix prepared for error feedback, shared by all matrices on the same inputs and all numbers of bits.

    Attributes:
        order: [in], from the input that carries most, while there are many left to make good for it.
        links: [in, in] fp32 in that order, upper triangular with ones on the diagonal: R_ik / R_kk.
        pivots: [in] fp32 in that order, R_kk^2, in units of the mean energy.
        damping: [in] fp32 in that order, what was added to the diagonal of the Gram matrix, in the same units.
        energy: of an input, in the mean.
        flatness: the geometric mean of the shares of inputs' energy that those before them do not tell of, from 1 where
            none tells of another: the determinant of the correlation matrix to the power of 1 / in.
        gram: [in, in] fp32, the Gram matrix in units of the mean energy.
    """

    order: Tensor
    links: Tensor
    pivots: Tensor
    damping: Tensor
    energy: float
    flatness: float
    gram: Tensor

    @classmethod
    def of(cls, gram: Tensor) -> Self | None:
        """Prepare the feedback from a Gram matrix `[in, in]`, the sum of x x^T over inputs x; it may be singular.

        Returns:
            `None` where all inputs are zero: then any error is as good as another.

        Raises:
            ValueError: it is not square, or not finite.
        """
        size = len(gram)
        if gram.shape != (size, size) or not bool(gram.sum().isfinite()):
            raise ValueError(f"error feedback needs a finite Gram matrix [{size}, {size}]")
        energy = gram.diagonal().double()
        mean = energy.mean()
        if not bool(mean > 0):
            return None
        order = energy.argsort(descending=True, stable=True)
        share = (energy / mean)[order]
        damping = damping_of(share)
        # With ones on the diagonal no pivot lies below the damping, which fp32 resolves. Backwards: a lower factor of
        # the inputs in reverse is an upper one of the inputs in order.
        size_of = (share + damping).sqrt()
        back, unit = order.flip(0), (1 / size_of).flip(0)
        scaled = torch.div(gram, mean, out=torch.empty_like(gram, dtype=torch.float32))
        correlation = scaled[back][:, back].mul_(unit.float()).mul_(unit.float()[:, None])
        correlation.diagonal().fill_(1)
        factor, flatness = correlation_factor(correlation)
        links = factor.flip(0, 1).mul_(size_of.float()[:, None])
        pivots = links.diagonal().clone()
        links.div_(pivots)
        return cls(order, links, pivots.square(), damping.float(), mean.item(), flatness, scaled)

    def output_errors(self, errors: Tensor) -> Tensor:
        """e G e^T of every row e of `errors` [rows, in], fp32: [rows], not below zero."""
        self.check(errors.shape[1])
        ordered = errors.float()[:, self.order]
        parts = (ordered @ self.links).mul_(self.pivots.sqrt())
        damped = ordered.square_() @ self.damping
        return (parts.square_().sum(1) - damped).clamp_min_(0) * self.energy

    def sizes(self, rows: Tensor) -> Tensor:
        """Numbers [rows] that the output errors of codes for `rows` [rows, in] are about proportional to.

        Each input is left with an error as large as its element, weighted by its energy given the inputs before it.
        """
        alone = torch.empty_like(self.pivots).index_copy_(0, self.order, self.pivots)
        return rows.float().square() @ alone * self.energy

    def check(self, inputs: int) -> None:
        """Raise `ValueError` unless the feedback is for so many inputs."""
        if len(self.order) != inputs:
            raise ValueError(
                f"error feedback needs a Gram matrix [{inputs}, {inputs}], not of {len(self.order)} inputs"
            )


def damping_of(energy: Tensor) -> Tensor:
    """What is added to the diagonal of a Gram matrix, `[in]`, given its own `energy` `[in]` in units of the mean."""
    return DAMPING * energy + _SILENT


def correlation_factor(correlation: Tensor) -> tuple[Tensor, float]:
    """Lower triangular factor `[in, in]` fp32 of a damped correlation matrix `[in, in]` fp32, and its determinant to
    the power of 1 / in. Raises `LinAlgError` for a matrix that is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(correlation)
    if int(failed):
        factor = torch.linalg.cholesky(correlation.double()).float()
    return factor, factor.diagonal().double().log().mean().mul(2).exp().item()


class Coded(NamedTuple):
    """Rows [out, in] with scales, the bits of their codes, and the nearest codes where these are known."""

    matrix: Tensor
    scales: Tensor
    bits: int
    codes: Tensor | None = None


def feed_back_together(parts: Sequence[Coded], feedback: Feedback) -> list[Tensor]:
    """Codes of each matrix with a smaller output error than the nearest ones, for given scales; no row's is larger.

    Matrices with few rows take together as long as one. They have as many groups; of more than 4 bits it is
    one alone.

    Args:
        parts: matrices `[out, in]`, floating and finite, and their scales `[out, groups]` as they will be stored.
        feedback: of the inputs.

    Returns:
        Of each `[out, in]` uint8.

    Raises:
        ValueError: there are other inputs behind the feedback.
    """
    for part in parts:
        feedback.check(part.matrix.shape[1])
    order, counts = feedback.order, [len(part.matrix) for part in parts]
    matrix = torch.cat([part.matrix.detach().float() for part in parts])
    errors = matrix.T.contiguous()[order]
    codes = torch.cat(
        [nearest_codes(part.matrix, part.scales, part.bits) if part.codes is None else part.codes for part in parts]
    )
    for part, own, rows in zip(parts, codes.split(counts), matrix.split(counts), strict=True):
        rows -= dequantize(own, part.scales.detach(), part.bits, torch.float32)
    scales = torch.cat([part.scales.detach().float() for part in parts]).T.contiguous()
    bits = [(part.bits, count) for part, count in zip(parts, counts, strict=True)]
    return list(better_codes(errors, matrix, codes, Lookup(bits, scales), len(scales), feedback).split(counts))


class Grid(Protocol):
    """Rounding of numbers to codes under scales that groups of columns share."""

    def nearest(self, values: Tensor, group: int, codes: Tensor) -> Tensor:
        """Round `values` [n] under a group's scales: writes `codes` [n], returns the numbers that they stand for.

        The result is a buffer that the next call overwrites.
        """


def fed_back(inputs: Tensor, grid: Grid, groups: int, feedback: Feedback) -> Tensor:
    """Codes [in, out] uint8 in any grid that make good for each other's errors.

    Args:
        inputs: [in, out] fp32, what codes are to stand for, one input of all outputs after the other; left as it is.
        grid: of all outputs.
        groups: of inputs that share a scale.
        feedback: of the inputs.

    Raises:
        ValueError: there are other inputs behind the feedback.
    """
    feedback.check(len(inputs))
    chosen = torch.empty_like(inputs, dtype=torch.uint8)
    _choose(inputs[feedback.order], chosen, grid, groups, feedback)
    return torch.empty_like(chosen).index_copy_(0, feedback.order, chosen)


def better_codes(errors: Tensor, nearest: Tensor, codes: Tensor, grid: Grid, groups: int, feedback: Feedback) -> Tensor:
    """Codes in any grid with a smaller output error than the nearest ones; no row's is larger.

    Args:
        errors: [in, out] fp32, what codes are to stand for, inputs in the order of `feedback`; overwritten.
        nearest: [out, in] fp32, the errors of the nearest codes.
        codes: [out, in], these.
        grid: of all outputs.
        groups: of inputs that share a scale.
        feedback: of the inputs.

    Returns:
        [out, in] in the dtype of `codes`.
    """
    # [in, out] from here on: one input of all outputs lies side by side.
    order = feedback.order
    chosen = torch.empty_like(errors, dtype=codes.dtype)
    lost = _choose(errors, chosen, grid, groups, feedback) - _damped(errors, feedback)
    worse = _is_larger(nearest.T.contiguous()[order], lost, feedback)
    fed = torch.empty_like(chosen).index_copy_(0, order, chosen).T.contiguous()
    return torch.where(worse[:, None], fed, codes)


def _choose(errors: Tensor, codes: Tensor, grid: Grid, groups: int, feedback: Feedback) -> Tensor:
    """Write `codes` [in, out]; the damped output error of every row [out].

    `errors` [in, out] holds the elements, of which their codes' values are subtracted.
    """
    columns, rows = errors.shape
    moved = torch.zeros_like(errors)
    lost = errors.new_zeros(rows)
    links, shared = feedback.links, feedback.order // (columns // groups)
    compiled = grid if isinstance(grid, CompiledRounding) and grid.is_compiled else None
    numbers, group_of, pivots = shared.int(), shared.tolist(), feedback.pivots.tolist()

    for first, middle, last in _halves(0, columns):
        if middle < last:
            moved[middle:last].addmm_(links[first:middle, middle:last].T, errors[first:middle])
            continue
        if compiled:
            at = slice(first, last)
            passed = links[at, at].contiguous()
            compiled.feed_back(errors[at], moved[at], codes[at], lost, passed, feedback.pivots[at], numbers[at])
            continue
        for column in range(first, last):
            own = moved[column].add_(errors[column])
            value = grid.nearest(own, group_of[column], codes[column])
            errors[column] -= value
            own -= value
            lost.addcmul_(own, own, value=pivots[column])
            moved[column + 1 : last].addr_(links[column, column + 1 : last], errors[column])
    return lost


def _halves(first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """How inputs are gone through: a block by itself as (first, last, last), and between two halves, each gone through
    in the same way, (first, middle, last), where errors of the first half are moved to the second."""
    if last - first <= _BLOCK:
        yield first, last, last
        return
    middle = first + (last - first + 1) // 2
    yield from _halves(first, middle)
    yield first, middle, last
    yield from _halves(middle, last)


def _damped(errors: Tensor, feedback: Feedback) -> Tensor:
    """What the damping adds to the output error of errors [in, out]: [out]."""
    return feedback.damping @ errors.square()


def _is_larger(errors: Tensor, limits: Tensor, feedback: Feedback) -> Tensor:
    """Whether the output error of errors [in, out] exceeds the limits [out], row by row.

    It is a sum of squares, of which few columns tell enough in most rows.
    """
    columns, rows = errors.shape
    size, step = feedback.pivots.sqrt(), -(-columns // _SLABS)
    left = limits + _damped(errors, feedback)
    open_ = torch.arange(rows, device=errors.device)
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        part = (feedback.links[:stop, start:stop].T @ errors[:stop]).mul_(size[start:stop, None])
        left[open_] -= part.square().sum(0)
        undecided = left[open_] >= 0
        open_, errors = open_[undecided], errors[:, undecided]
    return left < 0
