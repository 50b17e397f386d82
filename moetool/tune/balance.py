"""Router losses that do what they say: over real tokens only, layer by layer, with the scale written down."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.runtime.modules.routers import Routers

Sum = Callable[[Tensor], Tensor]


def _alone(tensor: Tensor) -> Tensor:
    return tensor


def balance_loss(
    logits: Tensor, top_k: int, real: Tensor, over_processes: Sum = _alone, chosen: Tensor | None = None
) -> Tensor:
    """E · Σ_e f_e P_e of one layer (Switch Transformer, arXiv:2101.03961, Eq. 4), over real tokens.

    f_e is the share of the assignments that expert e gets, P_e its mean probability. 1 if tokens and probabilities are
    evenly spread, E if one expert has everything; the gradient flows through P.

    Args:
        logits: `[tokens, experts]`.
        top_k: assignments per token.
        real: `[tokens]` bool; padding counts for nothing.
        over_processes: sums a tensor without gradient over the processes of a job. The mean of what they return, which
            is what their gradients are averaged to, is then the loss of all their tokens together.
        chosen: `[tokens, k]`, the experts that the router took; by default those of the largest logits.
    """
    probabilities = logits[real].float().softmax(-1)
    experts = probabilities.shape[-1]
    taken = probabilities.topk(top_k, dim=-1).indices if chosen is None else chosen[real]
    counts = over_processes(F.one_hot(taken, experts).sum((0, 1)).float())
    tokens, world = _tokens_and_processes(probabilities, over_processes)
    return experts * (counts / (taken.shape[-1] * tokens) * probabilities.sum(0) * (world / tokens)).sum()


def z_loss(logits: Tensor, real: Tensor, over_processes: Sum = _alone) -> Tensor:
    """Mean squared log-sum-exp of the logits `[tokens, experts]` of real tokens (ST-MoE, arXiv:2202.08906, Eq. 5)."""
    squares = logits[real].float().logsumexp(-1).square()
    tokens, world = _tokens_and_processes(squares, over_processes)
    return squares.sum() * (world / tokens)


def _tokens_and_processes(rows: Tensor, over_processes: Sum) -> tuple[Tensor, Tensor]:
    """How many rows all processes have, at least 1, and how many processes there are."""
    tokens, world = over_processes(torch.tensor([len(rows), 1], dtype=torch.float32, device=rows.device))
    return tokens.clamp_min(1), world


def balance_of(routers: Routers, top_k: int, real: Tensor, over_processes: Sum = _alone) -> Tensor:
    """Mean over the layers of `balance_loss`; `real` is `[tokens]`."""
    losses = [
        balance_loss(logits, top_k, real, over_processes, chosen)
        for logits, chosen in zip(routers.logits, routers.chosen, strict=True)
    ]
    return torch.stack(losses).mean()


def z_of(routers: Routers, real: Tensor, over_processes: Sum) -> Tensor:
    """Mean of the router z-loss (`z_loss`) over all MoE layers."""
    return torch.stack([z_loss(logits, real, over_processes) for logits in routers.logits]).mean()
