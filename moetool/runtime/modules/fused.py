"""Experts of one layer in fused tensors: those of transformers 5, and ours, which may lack gates and have biases."""

import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures.fused_layout import FusedLayout, layout_of
from moetool.architectures.shape import IDENTITIES, NORM, MoEShape, Role, fused_name
from moetool.architectures.trying import takes_weighed_inputs

_PLAIN = "transformers.integrations.moe"  # where act(gate) · up is, which most families have


def entering(experts: nn.Module) -> Tensor:
    """What meets the experts' input: `gate_up_proj [experts, 2·intermediate, hidden]`, or without gates `up_proj
    [experts, intermediate, hidden]`, as it lies in memory."""
    return getattr(experts, _entering_name(experts))


def _entering_name(experts: nn.Module) -> str:
    return "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"


def _entering_count(experts: nn.Module) -> int:
    """How many matrices of each expert meet its input."""
    return 2 if hasattr(experts, "gate_up_proj") else 1


def fused_tensors(
    shape: MoEShape,
    matrix: Callable[[int, Role], Tensor],
    dtype: torch.dtype,
    device: torch.device,
    lies: FusedLayout,
    experts: range | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """All experts of a layer, or some that follow each other, by the names of their fused tensors, from `matrix(expert,
    role)` `[out, in]`, one of which is in memory beside them."""
    experts = range(shape.experts) if experts is None else experts
    for roles in shape.groups:
        rows, columns = shape.matrix(roles[0])
        fused = torch.empty(len(experts), *lies.shape(len(roles) * rows, columns), dtype=dtype, device=device)
        for place, expert in enumerate(experts):
            for own, role in zip(lies.matrices(fused[place], len(roles)), roles, strict=True):
                own.copy_(matrix(expert, role))
        yield fused_name(roles), fused


def fused_matrix(shape: MoEShape, experts: nn.Module, expert: int, role: Role) -> Tensor:
    """One expert's matrix `[out, in]`, as a view of its fused tensor."""
    group = shape.group(role)
    fused: Tensor = getattr(experts, fused_name(group))
    return layout_of(experts).matrices(fused.detach()[expert], len(group))[group.index(role)]


class OwnGate:
    """What a family of transformers computes of gate and up that is not `act(gate) · up`, such as one with limits."""

    def __init__(self, native: Any) -> None:
        """`native` are experts with a method `_apply_gate` of their own, which sees their numbers and functions."""
        self._apply: Callable[[Any, Tensor], Tensor] = type(native)._apply_gate
        self._lies = layout_of(native)
        entries = {name: value for name, value in vars(native).items() if not name.startswith("_")}
        self._numbers = SimpleNamespace(**entries, **dict(native.named_children()))

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._apply(self._numbers, self._lies.joined([gate, up]))


Between = Callable[[Tensor], Tensor] | OwnGate


def activation_between(native: Any) -> Between:
    """What lies between gate, up and down in fused experts: an activation function, or a family's own gate."""
    own: Any = getattr(type(native), "_apply_gate", None)
    if own is None or own.__module__ == _PLAIN or own.__module__.startswith("moetool."):
        return native.act_fn
    return OwnGate(native)


def is_silu(act_fn: Between) -> bool:
    """Whether gate and up become silu(gate) · up."""
    from transformers.activations import ACT2CLS

    return act_fn is F.silu or type(act_fn) in (nn.SiLU, ACT2CLS["silu"])


def activated(act_fn: Between, values: Sequence[Tensor]) -> Tensor:
    """`act(gate) · up`, or without a gate `act(up)`; or what a family computes instead."""
    if isinstance(act_fn, OwnGate):
        return act_fn(*values)
    first, *rest = values
    return act_fn(first) * rest[0] if rest else act_fn(first)


def add_bias(experts: nn.Module, name: str, expert: int | Tensor, output: Tensor) -> Tensor:
    """An expert's output `[tokens, out]` by the fused tensor `name`, with the bias beside it if there is one. Or those
    of several, one of each `[experts, out]`."""
    bias = getattr(experts, f"{name}_bias", None)
    return output if bias is None else output + bias[expert]


def normed(experts: nn.Module, output: Tensor) -> Tensor:
    """What an expert gives `[tokens, hidden]`, through the norm that all experts of a layer share, if they have one."""
    norm: Callable[[Tensor], Tensor] | None = getattr(experts, NORM, None)
    return output if norm is None else norm(output)


def entered(experts: nn.Module, inputs: Tensor, matrix: Tensor) -> Tensor:
    """Products of `inputs` [tokens, in] with one expert's part of the fused tensor that meets them, without biases:
    those of the gate before those of up, `[tokens, out]`."""
    lies = layout_of(experts)
    return lies.canonical(F.linear(inputs, lies.rows(matrix)), _entering_count(experts))


def left(experts: nn.Module, activations: Tensor, matrix: Tensor) -> Tensor:
    """Products of `activations` [tokens, intermediate] with one expert's part of the fused tensor of down matrices."""
    return F.linear(activations, layout_of(experts).rows(matrix))


def activation(experts: Any, expert: int | Tensor, values: Tensor) -> Tensor:
    """What an expert's down matrix is given `[tokens, intermediate]`, from what `entered` gives."""
    lies, count = layout_of(experts), _entering_count(experts)
    values = add_bias(experts, _entering_name(experts), expert, lies.as_lying(values, count))
    if not getattr(experts, "has_gate", True) or not hasattr(experts, "_apply_gate"):
        return activated(experts.act_fn, lies.parts(values, count))
    own: Tensor = experts._apply_gate(values)
    return own


def on_weighed_inputs(run: Callable[[Tensor, Tensor, Tensor], Tensor], given: Tensor, experts: int) -> Tensor:
    """Call `run(hidden, chosen, weights)` where a block calls its experts with weighed inputs.

    Args:
        run: gives `[tokens, hidden]`.
        given: `[experts · tokens, hidden]`, zero where an expert was not chosen; every token has chosen one.
        experts: their number.
    """
    by_expert = given.view(experts, -1, given.shape[-1])
    chosen = by_expert.detach().abs().amax(-1).argmax(0)  # [tokens]
    hidden = by_expert[chosen, torch.arange(len(chosen), device=given.device)]
    output = run(hidden, chosen[:, None], torch.ones_like(hidden[:, :1]))
    # The block adds up what all experts give.
    return torch.cat([output, output.new_zeros(len(given) - len(output), given.shape[-1])])


def gives_back(experts: nn.Module) -> bool:
    """Whether a router also chooses experts without matrices, which give back what they are given (LongCat-Flash):
    they have the numbers after those of the others."""
    return identities(experts) > 0


def identities(experts: nn.Module) -> int:
    """Number of experts without matrices that a router also chooses."""
    count: int | None = getattr(experts, IDENTITIES, None)
    return count or 0


def given_back(hidden: Tensor, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    """The weighted sum of what experts without matrices give, those that are numbered from `experts` on: `[tokens,
    hidden]`, `[tokens, k]`, `[tokens, k]` → `[tokens, hidden]`."""
    return (hidden * weights.masked_fill(chosen < experts, 0).sum(-1, keepdim=True)).to(hidden.dtype)


def run_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what experts of any family give: `[tokens, hidden]`, `[tokens, k]`, `[tokens, k]` →
    `[tokens, hidden]`."""
    if not takes_weighed_inputs(experts):
        summed: Tensor = experts(hidden, chosen, weights)
        return summed
    count: Any = experts.num_experts
    every = experts(hidden.repeat(count, 1)).view(count, *hidden.shape)
    return (every[chosen, torch.arange(len(hidden))[:, None]] * weights[..., None]).sum(1)


def gathered(matrices: Tensor, pairs: Tensor, inputs: Tensor) -> Tensor:
    """Each input times a copy of the one of the `matrices` [experts, out, in] that it chose: `[pairs, in]` → `[pairs,
    out]`."""
    return torch.bmm(matrices.index_select(0, pairs), inputs.unsqueeze(-1)).squeeze(-1)


def gathered_sum(run: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute `weighted_sum` without waiting for what was chosen: `run` takes an expert for each of the rows."""
    pairs = chosen.reshape(-1)
    outputs = run(pairs, hidden.repeat_interleave(chosen.shape[1], 0))
    return (outputs.view(*chosen.shape, hidden.shape[1]) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def weighted_sum(run: Callable[[int, Tensor], Tensor], hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Each expert on the tokens that chose it, weighted and summed: `[tokens, hidden]`."""
    result = torch.zeros_like(hidden)
    for expert in chosen.unique().tolist():
        tokens, slot = torch.where(chosen == expert)
        output = run(expert, hidden[tokens]) * weights[tokens, slot, None]
        result.index_add_(0, tokens, output.to(result.dtype))
    return result


def without_tensors(experts: nn.Module) -> nn.Module:
    """A copy of fused experts with everything but parameters and buffers of their own."""
    made = copy.copy(experts)
    made.__dict__.update(_parameters={}, _buffers={}, _modules=dict(experts._modules))
    return made


def add_rows(total: Tensor, rows: Tensor, parts: Tensor) -> Tensor:
    """Add `parts` [routed, columns] to the rows `rows` [routed] of `total` [tokens, columns], in place; returns it.

    As `index_add_`, but keeps no `parts` for the backward, which `index_add_` does to know their shape.
    """
    added: Tensor = _AddRows.apply(total, rows, parts)
    return added


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, rows: Tensor, parts: Tensor) -> Tensor:
        ctx.mark_dirty(total)
        ctx.save_for_backward(rows)
        return total.index_add_(0, rows, parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        (rows,) = ctx.saved_tensors
        return gradient, None, gradient.index_select(0, rows)
