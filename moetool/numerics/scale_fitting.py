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

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from moetool.numerics.error_feedback import DAMPING
from moetool.numerics.groups import ELEMENTS
from moetool.numerics.precision import bf16_products, has_fast_bf16

_TINY = 1e-9  # share of the mean diagonal that holds what no input tells of at 1
_MOST_STRETCHED = 2.0  # times: of rows that lost more than half hardly anything is known
_AT_ONCE = 32 * ELEMENTS  # numbers of equations: with small groups those of all rows would not fit in memory


def fitted_scales(matrix: Tensor, decoded: Tensor, scales: Tensor, gram: Tensor) -> Tensor:
    """The scales that lose least at the output; where these are no better, as they are.

    Args:
        matrix: [out, in], floating.
        decoded: [out, in] fp32, what codes stand for under `scales`.
        scales: [out, groups], as stored.
        gram: [in, in], sum of x x^T over the inputs, in whatever unit: fp32 is enough.

    Returns:
        [out, groups] in the dtype of `scales`, of the same signs.
    """
    step = max(1, _AT_ONCE // scales.shape[1] ** 2)
    parts = zip(matrix.detach().split(step), decoded.split(step), scales.split(step), strict=True)
    gram = gram.to(decoded)
    return torch.cat([_fitted(*part, gram) for part in parts])


def _fitted(matrix: Tensor, decoded: Tensor, scales: Tensor, gram: Tensor) -> Tensor:
    """The same of some rows."""
    a, b = _normal_equations(matrix.float(), decoded, scales.shape[1], gram)
    held = _TINY * a.diagonal(dim1=1, dim2=2).mean(1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    a.diagonal(dim1=1, dim2=2).add_(held)
    b.add_(held)
    factors, failed = torch.linalg.solve_ex(a, b)
    usable = factors.isfinite() & (factors > 0) & (failed == 0)[:, None]
    stored = (scales.double() * torch.where(usable, factors, 1)).to(scales.dtype)
    factors = torch.where(scales != 0, stored.double() / scales.double(), 1).to(a)
    # A factor t costs t A t - 2 b t more than nothing.
    change = factors - 1
    residual = a.sum(2) - b
    better = (change * (torch.einsum("rgh,rh->rg", a, change) + 2 * residual)).sum(1) < 0
    return torch.where(better[:, None], stored, scales)


def _normal_equations(matrix: Tensor, decoded: Tensor, groups: int, gram: Tensor) -> tuple[Tensor, Tensor]:
    """A [out, groups, groups] and b [out, groups], fp64, of every row's least squares problem A t = b."""
    rows, columns = matrix.shape
    size = columns // groups
    damping = DAMPING * gram.diagonal()
    a = torch.empty(rows, groups, groups, dtype=torch.float64, device=matrix.device)
    b = torch.empty(rows, groups, dtype=torch.float64, device=matrix.device)
    step = max(1, 8 * ELEMENTS // columns)
    with _fast_products(matrix):
        for group in range(groups):
            own = slice(group * size, (group + 1) * size)
            slab = gram[own]
            for start in range(0, rows, step):
                part = slice(start, start + step)
                image = decoded[part, own] @ slab
                image[:, own] += decoded[part, own] * damping[own]
                b[part, group] = (image * matrix[part]).sum(1)
                later = image[:, own.start :].mul_(decoded[part, own.start :])
                a[part, group, group:] = later.view(len(later), -1, size).sum(2)
    return a.triu_().add_(a.triu(1).transpose(1, 2)), b


def stretched_scales(matrix: Tensor, decoded: Tensor, scales: Tensor, gram: Tensor) -> Tensor:
    """Scales under which the output of no row is smaller than it was, as far as it points where it did.

    Args are those of `fitted_scales`.

    Returns:
        [out, groups] in the dtype of `scales`; as they are where it could not hold others.
    """
    step, found = max(1, 8 * ELEMENTS // matrix.shape[1]), []
    gram = gram.to(decoded)
    with _fast_products(matrix):
        for rows, own, given in zip(matrix.detach().split(step), decoded.split(step), scales.split(step), strict=True):
            image = rows.float() @ gram
            left = (image * own).sum(1) / (image * rows).sum(1)
            times = left.reciprocal().nan_to_num(1.0).clamp(1.0, _MOST_STRETCHED)
            stored = (given.float() * times[:, None]).to(given.dtype)
            found.append(torch.where(stored.isfinite().all(1, keepdim=True), stored, given))
    return torch.cat(found)


def _fast_products(matrix: Tensor) -> AbstractContextManager[None]:
    return bf16_products() if matrix.device.type == "cpu" and has_fast_bf16() else nullcontext()
