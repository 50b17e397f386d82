"""Tensors of random numbers, each from a seed of its own."""

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Independent numbers of the standard normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def normal64(*shape: int, seed: int = 0) -> Tensor:
    """The same in fp64, where a test is to be sharp."""
    return normal(*shape, seed=seed, dtype=torch.float64)
