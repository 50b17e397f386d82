"""Estimated losses of all forms on offer for a delta, without encoding it in each.

The rows of a matrix are quantized independently of each other, so a few of them tell what all lose, by the ratio of
their loss to the size of their elements. Low-rank forms need all rows for the directions, but with U once quantized,
C = U^T D² Δ, and L L^T = U^T D² U, the parts W = L^-1 C of V's least-squares solution add up: without errors of V
rank r loses ‖D Δ‖_G² - sum_(i<r) w_i G w_i^T. What errors of V add is told by a few rows of W.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from moetool.compress.factors.sensitivity import MatrixSensitivity
from moetool.numerics.error_feedback import Feedback
from moetool.numerics.factorize import factorize, leading
from moetool.numerics.packing import rows_served
from moetool.numerics.trellis import WIDTHS
from moetool.representations import Measured, Representation
from moetool.representations.base import RowPart
from moetool.representations.quantized import encode_together
from moetool.representations.work import TRIAL_ROWS

_SERVED = max(map(rows_served, WIDTHS))  # rows that come together in a trellis
_TINY = 1e-300  # no sum of sizes is less, so that shares of it are numbers
_BRACKET_ROWS = 32  # of W between one rank on offer and the next


def prepared(delta: Tensor, forms: Sequence[Representation], measured: Measured) -> Measured:
    """`measured` with the leading directions of the delta `[out, in]` that the forms need, found once for all."""
    rank = max(form.directions for form in forms)
    if not rank:
        return measured
    norm = measured.norm
    scaled = delta if norm is None else norm.times(delta)
    found = factorize(scaled, gram=measured.gram, rank=rank, coarse=True)
    basis = leading(delta, found, rank, torch.float32, norm=norm)
    return replace(measured, factorization=found, basis=basis)


def losses(
    delta: Tensor, forms: Sequence[Representation], dtype: torch.dtype, measured: Measured, counts: MatrixSensitivity
) -> list[float]:
    """Loss of each form of a delta `[out, in]`: squared output error on the calibration inputs, weighted by output.

    Exact for matrices of few rows, about right for others.

    Args:
        delta: floating and finite.
        forms: of deltas, or the matrix itself, which loses nothing.
        dtype: of the model.
        measured: as `prepared` leaves it, with a Gram matrix and feedback.
        counts: how outputs count.
    """
    feedback = measured.feedback
    if feedback is None:  # the inputs are all zero
        return [0.0] * len(forms)
    trial = _Trial(dtype, replace(measured, norm=None, basis=None, factorization=None), feedback)
    scale = torch.ones(len(delta), device=delta.device)
    if counts.row_scale is not None:
        scale = counts.row_scale.to(delta.device).square()
    brackets = _brackets(delta, forms, measured, trial) if len(delta) > TRIAL_ROWS else []
    few = torch.arange(0, len(delta), max(1, len(delta) // TRIAL_ROWS), device=delta.device)
    few = few[: len(few) // _SERVED * _SERVED or None]
    size = feedback.sizes(delta) * scale

    def extended(errors: Tensor) -> float:
        return _extended(errors * scale[few], size[few], size)

    parts = [(form, form.row_parts((len(delta), delta.shape[1]))) for form in forms]
    whole_first = sorted((part for _, own in parts for part in own), key=lambda part: part.rows < len(delta))
    by_row = list(dict.fromkeys(part.form for part in whole_first if part.form is not None))
    # All of these rows in one go: few rows of one form take as long.
    errors = trial.errors([(delta[few], form) for form in by_row] + [(each.rows, each.form) for each in brackets])
    by_form: dict[Representation | None, float] = {
        form: extended(own) for form, own in zip(by_row, errors, strict=False)
    }
    if any(part.form is None for part in whole_first):
        by_form[None] = extended(feedback.output_errors(delta[few]))
    up_to = torch.cat([size.new_zeros(1), size.sort().values]).double().cumsum(0)
    by_rank, added = {}, 0.0
    for bracket, own in zip(brackets, errors[len(by_row) :], strict=True):
        added += _extended(own, bracket.few_sizes, bracket.sizes)
        by_rank[bracket.rank] = bracket.left + added

    def lost(form: Representation, parts: Sequence[RowPart]) -> float:
        if form.is_whole:
            return 0.0
        if form.nested is not None and form.directions in by_rank:
            return by_rank[form.directions]
        if len(parts) == 1:
            return by_form[parts[0].form]
        if parts:
            shares = ((up_to[part.last] - up_to[part.first]) / up_to[-1].clamp_min(_TINY) for part in parts)
            return sum(float(share) * by_form[part.form] for share, part in zip(shares, parts, strict=True))
        if not form.directions:
            return extended(made(form, delta[few]))
        return float(made(form, delta) @ scale)

    def made(form: Representation, rows: Tensor) -> Tensor:
        encoded = form.encode(rows, dtype, measured)
        return feedback.output_errors(rows - form.decode(encoded, (rows.shape[0], rows.shape[1]), dtype).to(rows))

    return [counts.weight * lost(form, own) for form, own in parts]


@dataclass(frozen=True, eq=False)
class _Trial:
    """Rows that are quantized to see what they lose: in a model of `dtype`, on measured inputs."""

    dtype: torch.dtype
    measured: Measured
    feedback: Feedback

    def errors(self, parts: Sequence[tuple[Tensor, Representation]]) -> list[Tensor]:
        """Output errors of the rows of matrices [rows, in], each in its form: [rows] of every one."""
        encoded = encode_together(parts, self.dtype, self.measured)
        lost = [
            rows - form.decode(tensors, (rows.shape[0], rows.shape[1]), self.dtype).to(rows)
            for (rows, form), tensors in zip(parts, encoded, strict=True)
        ]
        return list(self.feedback.output_errors(torch.cat(lost)).split([len(own) for own in lost])) if lost else []


def _extended(errors: Tensor, sizes: Tensor, all_sizes: Tensor) -> float:
    """The sum of all errors, from some of them and the sizes that they are in proportion to."""
    tried = float(sizes.sum())
    return float(errors.sum()) * (float(all_sizes.sum()) / tried if tried > 0 else 1.0)


@dataclass(frozen=True, eq=False)
class _Bracket:
    """The rows of W from one rank on offer to the next: some of them, and how large those and all are.

    `left` is what is lost at `rank` without errors of V.
    """

    rank: int
    left: float
    rows: Tensor
    form: Representation
    few_sizes: Tensor
    sizes: Tensor


def _brackets(delta: Tensor, forms: Sequence[Representation], measured: Measured, trial: _Trial) -> list[_Bracket]:
    """By rank on offer, ascending; none where U does not have full rank."""
    offered = {form.directions: form.nested for form in forms if form.nested is not None}
    if not offered or measured.factorization is None or measured.basis is None:
        return []
    stored_u, v = offered[max(offered)]
    u = stored_u(measured.basis, trial.dtype).to(delta)
    if measured.norm is not None:
        u, delta = measured.norm.times(u), measured.norm.times(delta)
    factor, failed = torch.linalg.cholesky_ex(u.T.double() @ u.double())
    if int(failed):
        return []
    parts = torch.linalg.solve_triangular(factor.float(), u.T @ delta, upper=False)  # W [rank, in]
    explained = trial.feedback.output_errors(parts).double().cumsum(0)
    sizes = trial.feedback.sizes(parts)
    found = []
    for first, last in pairwise([0, *sorted(offered)]):
        few = slice(first, last, max(1, (last - first) // _BRACKET_ROWS))
        left = max(0.0, measured.factorization.energy - float(explained[last - 1]))
        found.append(_Bracket(last, left, parts[few].contiguous(), v, sizes[few], sizes[first:last]))
    return found
