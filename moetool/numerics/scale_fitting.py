"""Scales that fit the codes chosen under them, by what errors do to the output.

Codes that make good for each other's errors (`numerics.error_feedback`) were chosen under scales that suit the nearest
ones. Once chosen, what a row of them loses, |w - sum_g t_g d_g|_G² with d_g what the codes of group g stand for, is a
least squares problem in one number t_g per group. On a trained model, and inputs not seen before, that removes half of
the error of codes of 1 bit, 10 to 20 % at 2 bits, 1 to 10 % at 3 bits: the more, the smaller the groups are. Of codes
under scales that were made wider before (`numerics.output_codes`) there are 3 to 15 % left for it.

What loses least by row is too small: with v what a row w has become, <w, v>_G = |v|_G² = |w|_G² less what is lost, so
that its output shrinks by the share that is lost. Errors of rows average out in what they are summed to, and their
shrinking does not. Rows are stretched until <w, v>_G = |w|_G²; each then loses more, by the same share again, and the
model less. On small trained models: 3 to 13 % of the KL divergence at 1 and 2 bits, 1 to 4 % with a shared base.
"""

import torch
from torch import Tensor

from moetool.numerics.error_feedback import DAMPING
from moetool.numerics.groups import ELEMENTS

_TINY = 1e-9  # share of the mean diagonal that holds what no input tells of at 1
_MOST_STRETCHED = 2.0  # times: of rows that lost more than half hardly anything is known
_AT_ONCE = 32 * ELEMENTS  # numbers of equations: with small groups those of all rows would not fit in memory


def fitted_scales(matrix: Tensor, decoded: Tensor, scales: Tensor, gram: Tensor, *, keeps_size: bool = False) -> Tensor:
    """Find the scales with the least output error for given codes; rows in which they are no better keep their own.

    Args:
        matrix: [out, in], floating.
        decoded: [out, in] fp32, what codes stand for under `scales`.
        scales: [out, groups], as stored.
        gram: [in, in], sum of x x^T over the inputs, in whatever unit: fp32 is enough.
        keeps_size: whether they are stretched then, so that the output of no row is smaller than it was, as far as it
            points where it did.

    Returns:
        [out, groups] in the dtype of `scales`, of the same signs; as they are where it could not hold others.
    """
    step = max(1, min(_AT_ONCE // scales.shape[1] ** 2, 8 * ELEMENTS // matrix.shape[1]))
    parts = zip(matrix.detach().split(step), decoded.split(step), scales.split(step), strict=True)
    gram, found = gram.to(decoded), []
    for rows, own, given in parts:
        # In fp32: products of bf16, where a processor has them, leave 2 % of a scale unsure under loud inputs.
        image = rows.float() @ gram
        a, b = _normal_equations(own, image, scales.shape[1], gram)
        damping = _by_group((own * rows).mul_(DAMPING * gram.diagonal()), scales.shape[1])
        fitted = _fitted(a, b + damping, given)
        found.append(_stretched(fitted, given, b, (image * rows).sum(1)) if keeps_size else fitted)
    return torch.cat(found)


def _fitted(a: Tensor, b: Tensor, scales: Tensor) -> Tensor:
    """By the solutions of A t = b, with A [out, groups, groups], overwritten, and b [out, groups]."""
    held = _TINY * a.diagonal(dim1=1, dim2=2).mean(1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    a.diagonal(dim1=1, dim2=2).add_(held)
    b = b + held
    factors, failed = torch.linalg.solve_ex(a, b)
    usable = factors.isfinite() & (factors > 0) & (failed == 0)[:, None]
    stored = (scales.double() * torch.where(usable, factors, 1)).to(scales.dtype)
    # A factor t costs t A t - 2 b t more than nothing.
    change = _times(stored, scales) - 1
    residual = a.sum(2) - b
    better = (change * (torch.einsum("rgh,rh->rg", a, change) + 2 * residual)).sum(1) < 0
    return torch.where(better[:, None], stored, scales)


def _normal_equations(decoded: Tensor, image: Tensor, groups: int, gram: Tensor) -> tuple[Tensor, Tensor]:
    """A [out, groups, groups], damped, and b [out, groups], not damped, fp64, of every row's least squares problem
    A t = b, for the `image` [out, in] of the matrix under the Gram matrix."""
    rows, columns = decoded.shape
    size = columns // groups
    a = torch.zeros(rows, groups, groups, dtype=torch.float64, device=decoded.device)
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        later = (decoded[:, own] @ gram[own, own.start :]).mul_(decoded[:, own.start :])
        a[:, group, group:] = _by_group(later, groups - group)
    damping = _by_group(decoded.square().mul_(DAMPING * gram.diagonal()), groups)
    a += a.triu(1).transpose(1, 2)
    a.diagonal(dim1=1, dim2=2).add_(damping)
    return a, _by_group(image * decoded, groups)


def _by_group(numbers: Tensor, groups: int) -> Tensor:
    """The sums over every group of inputs, fp64: [out, groups]."""
    return numbers.view(len(numbers), groups, -1).sum(2).double()


def _stretched(fitted: Tensor, scales: Tensor, b: Tensor, size: Tensor) -> Tensor:
    """Times what brings the products of outputs with what they were, b t, to the `size` [out] of what they were."""
    left = (b * _times(fitted, scales)).sum(1) / size
    times = left.reciprocal().nan_to_num(1.0).clamp(1.0, _MOST_STRETCHED)
    stored = (fitted.double() * times[:, None]).to(fitted.dtype)
    return torch.where(stored.isfinite().all(1, keepdim=True), stored, fitted)


def _times(scales: Tensor, before: Tensor) -> Tensor:
    """Ratio of new scales to those before, fp64."""
    return torch.where(before != 0, scales.double() / before.double(), 1)
