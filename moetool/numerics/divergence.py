"""KL divergence of distributions that are given by logarithms of their probabilities."""

from torch import Tensor


def divergence(original: Tensor, model: Tensor) -> Tensor:
    """KL divergence in nats `[...]` of a model's distributions from an original's, each given by the natural logarithms
    of its probabilities, `[..., outcomes]`. Of a part of the outcomes it is that part's sum."""
    return (original.exp() * (original - model)).sum(-1)
