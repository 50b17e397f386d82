"""The hard concrete distribution: gates in [0, 1] that are exactly zero with a probability that can be trained.

Louizos et al., arXiv:1712.01312, Eq. 10 to 12, with the parameter log φ (their log α). SIMoE's Eq. 4 and 5 leave out
the stretch to (γ, ζ), without which nothing would ever be zero.
"""

import math

import torch
from torch import Tensor

GAMMA, ZETA, BETA = -0.1, 1.1, 2 / 3
# P(gate ≠ 0) = sigmoid(log φ + SHIFT).
SHIFT = -BETA * math.log(-GAMMA / ZETA)
# The least log φ whose median gate is surely open, by 1e-6.
EDGE = 1e-5 - SHIFT


def median_gate(log_phi: Tensor) -> Tensor:
    """The gate without chance: `clamp(sigmoid(log φ / β)(ζ − γ) + γ, 0, 1)`, of the shape of `log_phi`."""
    return ((log_phi / BETA).sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def sampled_gate(log_phi: Tensor) -> Tensor:
    """Draw a value in 0 to 1 for every gate, of the shape of `log_phi` and differentiable in it."""
    noise = torch.rand_like(log_phi).clamp(1e-6, 1 - 1e-6)
    return (((log_phi + noise.logit()) / BETA).sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def open_probability(log_phi: Tensor) -> Tensor:
    """The probability that a gate is not zero, of the shape of `log_phi`; summed over gates it is their expected L0
    norm."""
    return (log_phi + SHIFT).sigmoid()


def log_phi_for(zero_probability: float) -> float:
    """The parameter at which a gate is zero with that probability."""
    return math.log((1 - zero_probability) / zero_probability) - SHIFT
