"""Least-squares factors between groups of numbers before and after each group was multiplied by one."""

import torch
from torch import Tensor


def factors_between(old: Tensor, new: Tensor) -> Tensor:
    """Find the factor of each group with which it comes nearest to what it became.

    Args:
        old: [..., groups, numbers], floating.
        new: the same after it was multiplied.

    Returns:
        [..., groups]; 1 where all of a group is 0.
    """
    energy = old.square().sum(-1)
    return torch.where(energy > 0, (new * old).sum(-1) / energy, 1)
