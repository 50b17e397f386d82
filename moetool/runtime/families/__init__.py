"""Classes in the place of some of transformers' own, which it builds models of as soon as moetool is imported."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

from torch import Tensor, nn

from moetool.architectures import MoEShape
from moetool.runtime.modules.moe import FusedExperts


def fused_experts(shape: MoEShape, activation: Callable[[Tensor], Tensor], spread: float) -> FusedExperts:
    """Experts in fused tensors, whose weights are drawn with a standard deviation of `spread`."""
    experts = FusedExperts(SimpleNamespace(shape=shape, act_fn=activation))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=spread)
    return experts


def take_the_place(of: type[nn.Module], own: type[nn.Module]) -> None:
    """Let transformers build one of our classes where its models have one of its own.

    The name is bound in the module of `of`. transformers' `register_patch_mapping` would look for it in all modules
    that are loaded, and again whenever a model of any family is built.
    """
    setattr(sys.modules[of.__module__], of.__name__, own)
