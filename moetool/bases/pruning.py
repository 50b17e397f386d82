"""Pruning of the base's intermediate channels, static or semi-dynamic (D²-MoE §3.4, Eq. 9, Algorithm 3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.bases.choices import BaseCompression


@dataclass(frozen=True)
class PruningPlan:
    """Number of intermediate channels that leave the file, and of those that each batch skips at run time."""

    static: int
    dynamic: int


def plan_pruning(intermediate: int, ratio: float, mode: BaseCompression) -> PruningPlan:
    """Prune `floor(intermediate · ratio)` channels statically, or half of them so and the rest dynamically; none where
    the base gets smaller in another way."""
    if mode == "svd":
        return PruningPlan(static=0, dynamic=0)
    total = int(intermediate * ratio + 1e-9)  # 100 · 0.29 is 29, not 28.999…
    static = total if mode == "static" else int(intermediate * ratio / 2 + 1e-9)
    return PruningPlan(static=static, dynamic=total - static)


def kept_channels(base_down: Tensor, channel_energy: Tensor, static: int) -> Tensor:
    """Indices (ascending int64) of the channels that stay after the `static` weakest are removed.

    The score of channel j is `‖base_down[:, j]‖ · ‖h_j‖`: how much of the base's output would be lost with it.

    Args:
        base_down: `[hidden, channels]`.
        channel_energy: `[channels]`, Σ over calibration tokens of h_j².
        static: how many to remove.
    """
    score = base_down.double().norm(dim=0) * channel_energy.double().sqrt()
    return score.argsort(stable=True)[static:].sort().values


def prune_base(base: dict[Role, Tensor], channels: Tensor) -> dict[Role, Tensor]:
    """Keep only `channels` of the base: rows of gate and up, columns of down."""
    return {
        role: (matrix.index_select(1, channels) if role == "down" else matrix.index_select(0, channels)).contiguous()
        for role, matrix in base.items()
    }


def spread(base: Tensor, channels: Tensor, intermediate: int, dimension: int) -> Tensor:
    """Inverse of pruning along `dimension`, with zeros where channels are gone."""
    if len(channels) == intermediate:
        return base
    shape = list(base.shape)
    shape[dimension] = intermediate
    return torch.zeros(shape, dtype=base.dtype, device=base.device).index_copy(dimension, channels, base)
