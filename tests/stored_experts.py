"""The compressed experts of every kind in `kinds`, and what to give them."""

import copy
from functools import cache
from typing import Any

import torch
from kinds import KINDS, _fill_stored
from torch import Tensor

from moetool.quiet import quiet
from moetool.runtime.modules.experts import SharedBaseExperts

STORED = (
    "low-rank",
    "dynamic",
    "shared-factors",
    "quantised",
    "sparse",
    "formats",
    "no-base",
    "rotated",
    "rotated-base",
    "trellis",
    "shared-expert-on-base",
    "mixture-on-base-with-biases",
)


@cache
def _built(kind: str) -> Any:
    with quiet(), torch.random.fork_rng(devices=[]):
        return KINDS[kind]().eval()


def model_of(kind: str) -> Any:
    """A model of its own."""
    return copy.deepcopy(_built(kind))


def experts_in(model: Any) -> list[SharedBaseExperts]:
    """The compressed experts of its layers."""
    return [module for module in model.modules() if isinstance(module, SharedBaseExperts)]


def experts_of(kind: str) -> list[SharedBaseExperts]:
    """Those of a kind, in fp32."""
    return experts_in(model_of(kind))


def others_of(kind: str) -> list[SharedBaseExperts]:
    """Experts with other numbers, codes and positions in the same forms."""
    found = experts_of(kind)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for seed, experts in enumerate(found):
            torch.manual_seed(seed)
            for tensor in experts.parameters():
                flat = tensor.view(-1)
                flat.copy_(flat[torch.randperm(len(flat))])
            _fill_stored(experts)
    return found


def batch(experts: SharedBaseExperts, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the experts that each token chose, and their weights."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, experts.hidden_dim, generator=generator).to(dtype)
    weights, chosen = torch.randn(tokens, experts.num_experts, generator=generator).softmax(-1).topk(2)
    return hidden, chosen, weights.to(dtype)


def is_on_kernels(experts: SharedBaseExperts) -> bool:
    """Whether they run there when no gradients are wanted."""
    return experts._kernels.of(experts) is not None


def distance(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
