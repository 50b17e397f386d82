"""Numerical trial of experts whose class has no decorator of transformers: do they compute what fused experts
compute?"""

import copy
import inspect
from typing import TYPE_CHECKING, Any

from moetool.architectures.fused_layout import layout_of
from moetool.architectures.shape import IDENTITIES

if TYPE_CHECKING:
    from torch import Tensor, nn

_HIDDEN, _WIDTH, _TOKENS, _CHOSEN = 8, 4, 6, 2


def takes_weighed_inputs(experts: "nn.Module") -> bool:
    """Whether a family's router weighs what experts are given and not what they give (Llama 4): its block calls them
    with nothing else, every token once for each expert."""
    return len(inspect.signature(type(experts).forward).parameters) == 2


def are_ordinary(experts: Any) -> bool:
    """Whether experts give `down(act(gate) · up)`, or with a gate of their own what `_apply_gate` makes of both, and
    those without matrices what they are given.

    They are on the meta device; a copy with few channels is run on the processor.
    """
    import torch

    with torch.device("cpu"), torch.no_grad():
        return _are_ordinary(experts)


def _are_ordinary(experts: Any) -> bool:
    import torch

    both, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if both is None or down is None or both.ndim != 3 or down.ndim != 3 or len(both) != len(down):
        return False
    lies, count, generator = layout_of(experts), len(down), torch.Generator().manual_seed(0)
    hidden, width = (int(size) for size in lies.rows(down).shape[1:])
    small = {hidden: _HIDDEN, width: _HIDDEN if hidden == width else _WIDTH}
    made = copy.copy(experts)
    numbers = {name: small[size] for name, size in vars(experts).items() if type(size) is int and size in small}
    made.__dict__.update(numbers, _parameters={}, _buffers={})

    def drawn(*shape: int) -> "Tensor":
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    first, second = drawn(count, 2 * small[width], _HIDDEN), drawn(count, _HIDDEN, small[width])
    made.gate_up_proj = torch.nn.Parameter(lies.rows(first).contiguous(), requires_grad=False)
    made.down_proj = torch.nn.Parameter(lies.rows(second).contiguous(), requires_grad=False)
    inputs = drawn(_TOKENS, _HIDDEN)
    try:
        joined = torch.einsum("th,eoh->eto", inputs, first)
        gate, up = joined.chunk(2, -1)
        inner = made._apply_gate(joined) if hasattr(made, "_apply_gate") else made.get_submodule("act_fn")(gate) * up
        every = torch.einsum("etw,ehw->eth", inner, second)  # of every expert
        if takes_weighed_inputs(experts):
            return torch.allclose(made.forward(inputs.repeat(count, 1)).view_as(every), every)
        every = torch.cat([every, inputs.expand(getattr(experts, IDENTITIES, None) or 0, *inputs.shape)])
        weights, chosen = drawn(_TOKENS, len(every)).topk(min(_CHOSEN, count))
        summed = (every[chosen, torch.arange(_TOKENS)[:, None]] * weights[..., None]).sum(1)
        return torch.allclose(made.forward(inputs, chosen, weights), summed)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
