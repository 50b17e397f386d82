"""Weights that accelerate keeps on disk or in another memory, present where they are read.

accelerate fetches the tensors of a module when that module is called, and lets go of them when it returns. A module
that computes with the tensors of another, without calling it, has to hold that one `loaded` meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from accelerate.hooks import ModelHook


def below(module: nn.Module) -> list[nn.Module]:
    """List all modules inside a module, at any depth, without itself."""
    found: list[nn.Module] = []
    waiting: list[nn.Module | None] = list(module._modules.values())
    while waiting:
        if (inner := waiting.pop()) is not None:
            found.append(inner)
            waiting.extend(inner._modules.values())
    return found


@contextmanager
def loaded(*modules: nn.Module) -> Iterator[bool]:
    """Have the tensors of these modules (not of those in them) where they compute, for the time of the `with` block.

    Calls of the modules find theirs there, too, and leave them. Costs next to nothing if nothing is offloaded; gives
    whether something is.
    """
    opened: list[tuple[nn.Module, ModelHook]] = []
    try:
        for module in modules:
            if is_fetched(module):
                hook: ModelHook = module.__dict__["_hf_hook"]
                opened.append((module, hook))
                hook.pre_forward(module)
                module.__dict__["_hf_hook"] = _idle()
        yield bool(opened)
    finally:
        for module, hook in reversed(opened):
            module.__dict__["_hf_hook"] = hook
            hook.post_forward(module, None)


def is_offloaded(module: nn.Module) -> bool:
    """Whether some tensor of a module, or of one in it, is not in memory between calls."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def is_fetched(module: object) -> bool:
    """Whether the tensors of a module, not of those in it, are in memory for the time of a call only."""
    hook = module.__dict__.get("_hf_hook")
    return hook is not None and any(getattr(own, "offload", False) for own in (hook, *getattr(hook, "hooks", ())))


def _idle() -> "ModelHook":
    from accelerate.hooks import ModelHook

    return ModelHook()
