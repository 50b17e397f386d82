"""One shared base out of all experts of a layer (D²-MoE §3.2; Table 5 compares the choices)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.errors import UsageError
from moetool.methods.choices import Merge

# Below this, a sum of squared gradients has lost its digits in fp32 and says nothing about the experts' importance.
_UNDERFLOW = 1e-32


def fisher_base(weighted: Tensor, total: Tensor, mean: Tensor) -> Tensor:
    """`Σ_j F_j W_j / Σ_j F_j` element by element; the plain mean where no gradient ever arrived (Eq. 5).

    Args:
        weighted: `Σ_j F_j W_j` `[out, in]` fp32.
        total: `Σ_j F_j`.
        mean: `Σ_j W_j / E`.
    """
    informed = total > _UNDERFLOW
    return torch.where(informed, weighted / torch.where(informed, total, 1.0), mean)


def mean_base(weights: list[Tensor]) -> Tensor:
    """The plain mean of `E` matrices `[out, in]`, in fp32."""
    total = torch.zeros_like(weights[0], dtype=torch.float32)
    for weight in weights:
        total += weight.float()
    return total / len(weights)


def frequency_base(weights: list[Tensor], tokens: Tensor) -> Tensor:
    """The mean weighted by how many tokens each expert was given; `tokens` is `[E]`. Plain mean if there were none."""
    if not tokens.any():
        return mean_base(weights)
    base = torch.zeros_like(weights[0], dtype=torch.float32)
    for weight, share in zip(weights, (tokens.double() / tokens.sum()).tolist(), strict=True):
        base += share * weight.float()
    return base


def merge(
    method: Merge,
    role: Role,
    weights: list[Tensor],
    tokens: Tensor | None = None,
    fisher: tuple[Mapping[Role, Tensor], Mapping[Role, Tensor]] | None = None,
) -> Tensor:
    """The base of one role in fp32 by the named method.

    Args:
        method: which merge.
        role: gate, up or down.
        weights: the experts' matrices `[out, in]`.
        tokens: `[E]`, needed by `frequency`.
        fisher: the sums `Σ F_j W_j` and `Σ F_j` by role, needed by `fisher`.
    """
    if method == "mean":
        return mean_base(weights)
    if method == "frequency" and tokens is not None:
        return frequency_base(weights, tokens)
    if method == "fisher" and fisher is not None:
        weighted, total = fisher
        return fisher_base(weighted[role], total[role], mean_base(weights))
    raise UsageError(f"--merge {method} needs calibration text: give --calibration.")
