"""One shared base out of all experts of a layer (D²-MoE §3.2; Table 5 compares the choices)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.bases.choices import Merge
from moetool.checkpoint.experts import Weights
from moetool.errors import UsageError

# Below this, a sum of squared gradients has lost its digits in fp32 and says nothing about the experts' importance.
_UNDERFLOW = 1e-32
# TIES keeps this share of every expert's difference to the mean (arXiv:2306.01708 §4).
_TIES_DENSITY = 0.2
# RegMean shrinks what lies off the diagonal of each Gram matrix by this factor (arXiv:2212.09849 §3.3).
_REGMEAN_ALPHA = 0.9


class Matrices(Sequence[Tensor]):
    """A sequence of the experts' matrices `[out, in]` of one role, each of which is read when it is indexed and not
    kept."""

    def __init__(self, weights: Weights, role: Role, count: int, device: torch.device) -> None:
        self._weights, self._role, self._count, self._device = weights, role, count, device

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, expert: int) -> Tensor:  # type: ignore[override]  # no slices
        if expert >= self._count:
            raise IndexError(expert)
        return self._weights(expert, self._role).to(self._device)


@dataclass(frozen=True)
class Regression:
    """Sums over experts from which RegMean solves for the base of one role.

    Attributes:
        products: `Σ_j W_j G_j` `[out, in]` fp64, G_j the Gram matrix of the inputs of expert j.
        gram: `Σ_j G_j` `[in, in]` fp64.
        diagonals: `[experts, in]` fp64, the diagonal of each G_j.
    """

    products: Tensor
    gram: Tensor
    diagonals: Tensor


def fisher_base(weighted: Tensor, total: Tensor, mean: Tensor) -> Tensor:
    """`Σ_j F_j W_j / Σ_j F_j` element by element; the plain mean where no gradient ever arrived (Eq. 5).

    Args:
        weighted: `Σ_j F_j W_j` `[out, in]` fp32.
        total: `Σ_j F_j`.
        mean: `Σ_j W_j / E`.
    """
    informed = total > _UNDERFLOW
    return torch.where(informed, weighted / torch.where(informed, total, 1.0), mean)


def mean_base(weights: Sequence[Tensor]) -> Tensor:
    """Average the matrices `[out, in]` of all experts with equal weight, in fp32."""
    total = torch.zeros_like(weights[0], dtype=torch.float32)
    for weight in weights:
        total += weight.float()
    return total / len(weights)


def frequency_base(weights: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """The mean weighted by how many tokens each expert was given; `tokens` is `[E]`. Plain mean if there were none."""
    if not tokens.any():
        return mean_base(weights)
    base = torch.zeros_like(weights[0], dtype=torch.float32)
    for weight, share in zip(weights, (tokens.double() / tokens.sum()).tolist(), strict=True):
        base += share * weight.float()
    return base


def ties_base(weights: Sequence[Tensor], density: float = _TIES_DENSITY) -> Tensor:
    """The mean plus the TIES merge of the differences to it (arXiv:2306.01708, Algorithm 1, λ = 1).

    Each difference keeps its `density` largest entries; per element the sign with the larger total wins, and the
    differences of that sign are averaged.
    """
    mean = mean_base(weights)
    kept = max(1, round(density * mean.numel()))

    def trimmed(weight: Tensor) -> Tensor:
        difference = weight.float() - mean
        threshold = difference.abs().flatten().kthvalue(difference.numel() - kept + 1).values
        return torch.where(difference.abs() >= threshold, difference, 0.0)

    # Twice through the experts, so that one difference is in memory at a time.
    sign = torch.zeros_like(mean)
    for weight in weights:
        sign += trimmed(weight)
    sign = sign.sign()
    total, count = torch.zeros_like(mean), torch.zeros_like(mean)
    for weight in weights:
        difference = trimmed(weight)
        agrees = (difference * sign) > 0
        total += torch.where(agrees, difference, 0.0)
        count += agrees
    return mean + total / count.clamp_min(1.0)


def regmean_base(weights: Sequence[Tensor], regression: Regression, alpha: float = _REGMEAN_ALPHA) -> Tensor:
    """The matrix whose outputs are closest to all experts' on their own inputs (RegMean, arXiv:2212.09849, Eq. 2).

    `(Σ_j W_j Ĝ_j) (Σ_j Ĝ_j)⁻¹` with the off-diagonal part of each Gram matrix shrunk by `alpha`. Input channels that
    carried nothing get the plain mean.
    """
    mean = mean_base(weights)
    products = alpha * regression.products
    for weight, diagonal in zip(weights, regression.diagonals, strict=True):
        products += (1 - alpha) * weight.double() * diagonal.to(weight.device)
    energy = regression.gram.diagonal()
    gram = alpha * regression.gram + (1 - alpha) * torch.diag(energy)
    alive = energy > 0
    if not bool(alive.any()):
        return mean
    inside = gram[alive][:, alive]
    solved = torch.linalg.solve(inside, products[:, alive].T).T  # positive definite, as alpha < 1
    base = mean.double()
    base[:, alive] = solved
    return base.float()


def merge(
    method: Merge,
    role: Role,
    weights: Sequence[Tensor],
    tokens: Tensor | None = None,
    fisher: tuple[Mapping[Role, Tensor], Mapping[Role, Tensor]] | None = None,
    regression: Mapping[Role, Regression] | None = None,
) -> Tensor:
    """The base of one role in fp32 by the named method.

    Args:
        method: which merge.
        role: gate, up or down.
        weights: the experts' matrices `[out, in]`.
        tokens: `[E]`, needed by `frequency`.
        fisher: the sums `Σ F_j W_j` and `Σ F_j` by role, needed by `fisher` and, with F_j already multiplied by the
            routing frequency, by `fisher-frequency`.
        regression: by role, needed by `regmean`.
    """
    if method == "mean":
        return mean_base(weights)
    if method == "ties":
        return ties_base(weights)
    if method == "frequency" and tokens is not None:
        return frequency_base(weights, tokens)
    if method in ("fisher", "fisher-frequency") and fisher is not None:
        weighted, total = fisher
        return fisher_base(weighted[role], total[role], mean_base(weights))
    if method == "regmean" and regression is not None:
        return regmean_base(weights, regression[role])
    raise UsageError(f"--merge {method} needs calibration text: give --calibration.")
