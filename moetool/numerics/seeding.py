"""Random streams that depend on nothing but a seed and what they are for."""

import hashlib

import torch
from torch import Tensor


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Make a CPU generator for one purpose, such as `("router", layer)`, that does not depend on what was drawn
    before."""
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def uniform(shape: tuple[int, ...], std: float, stream: torch.Generator) -> Tensor:
    """Numbers of mean 0 and that standard deviation, evenly distributed: fp32."""
    return (2 * torch.rand(shape, generator=stream) - 1) * (std * 3**0.5)


def linear_std(hidden: int) -> float:
    """1/√(3d), the standard deviation of a fresh `nn.Linear`: logits of about ±½ on normalised inputs."""
    return 1.0 / (3.0 * hidden) ** 0.5
