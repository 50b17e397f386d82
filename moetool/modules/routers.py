"""Routers of transformers' mixture-of-experts families, whose classes have in common how they are called."""

from torch import Tensor, nn


def is_router(module: nn.Module) -> bool:
    """Whether a module is a family's own router."""
    return type(module).__name__.lower().endswith("topkrouter")


def routed(output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """Logits `[tokens, experts]` and the experts taken `[tokens, k]`, where it says so, of what a router has returned.

    The order is logits, weights, experts; Granite's, in older versions, has it the other way round.
    """
    ordered = output if output[0].is_floating_point() else output[::-1]
    return ordered[0], ordered[2] if len(ordered) > 2 else None
