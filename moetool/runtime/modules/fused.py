"""Experts of one layer in fused tensors: those of transformers 5, and ours, which may lack gates and have biases."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures.base import MoEShape, Role, fused_name


def entering(experts: nn.Module) -> Tensor:
    """What meets the experts' input: `gate_up_proj [experts, 2·intermediate, hidden]`, or without gates `up_proj
    [experts, intermediate, hidden]`."""
    return getattr(experts, _entering_name(experts))


def _entering_name(experts: nn.Module) -> str:
    return "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"


def fused_tensors(
    shape: MoEShape, matrix: Callable[[int, Role], Tensor], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """All experts of a layer by the names of their fused tensors, from `matrix(expert, role)` `[out, in]`, one of which
    is in memory beside them."""
    for roles in shape.groups:
        rows, columns = shape.matrix(roles[0])
        fused = torch.empty(shape.experts, len(roles) * rows, columns, dtype=dtype, device=device)
        for expert in range(shape.experts):
            for own, role in zip(fused[expert].chunk(len(roles)), roles, strict=True):
                own.copy_(matrix(expert, role))
        yield fused_name(roles), fused


def fused_matrix(shape: MoEShape, experts: nn.Module, expert: int, role: Role) -> Tensor:
    """One expert's matrix `[out, in]`, as a view of its fused tensor."""
    group = shape.group(role)
    fused: Tensor = getattr(experts, fused_name(group))
    return fused.detach()[expert].chunk(len(group))[group.index(role)]


def activated(act_fn: Callable[[Tensor], Tensor], values: Sequence[Tensor]) -> Tensor:
    """`act(gate) · up`, or without a gate `act(up)`."""
    first, *rest = values
    return act_fn(first) * rest[0] if rest else act_fn(first)


def add_bias(experts: nn.Module, name: str, expert: int, output: Tensor) -> Tensor:
    """An expert's output `[tokens, out]` by the fused tensor `name`, with the bias beside it if there is one."""
    bias = getattr(experts, f"{name}_bias", None)
    return output if bias is None else output + bias[expert]


def activation(experts: Any, expert: int, values: Tensor) -> Tensor:
    """What an expert's down matrix is given `[tokens, intermediate]`, from the products of its input with the fused
    tensor before it, without bias."""
    return experts._apply_gate(add_bias(experts, _entering_name(experts), expert, values))


def weighted_sum(run: Callable[[int, Tensor], Tensor], hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Each expert on the tokens that chose it, weighted and summed: `[tokens, hidden]`."""
    result = torch.zeros_like(hidden)
    for expert in chosen.unique().tolist():
        tokens, slot = torch.where(chosen == expert)
        output = run(expert, hidden[tokens]) * weights[tokens, slot, None]
        result.index_add_(0, tokens, output.to(result.dtype))
    return result


class FusedExperts(nn.Module):
    """Experts named and laid out as transformers has them: `gate_up_proj` or `up_proj`, `down_proj [experts, hidden,
    intermediate]`, and `…_bias [experts, out]` beside those that have biases."""

    down_proj: nn.Parameter

    def __init__(self, config: SimpleNamespace) -> None:
        """`config` has the `shape` and `act_fn`; parameters are left as they come."""
        super().__init__()
        shape: MoEShape = config.shape
        self.config = config
        self.act_fn = config.act_fn
        self.num_experts, self.hidden_dim, self.intermediate_dim = shape.experts, shape.hidden, shape.intermediate
        for roles in shape.groups:
            name, (rows, columns) = fused_name(roles), shape.matrix(roles[0])
            rows *= len(roles)
            setattr(self, name, nn.Parameter(torch.empty(shape.experts, rows, columns)))
            if roles[0] in shape.biases:
                setattr(self, f"{name}_bias", nn.Parameter(torch.empty(shape.experts, rows)))

    def _apply_gate(self, values: Tensor) -> Tensor:
        return activated(self.act_fn, values.chunk(len(self.config.shape.entering), dim=-1))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[tokens, hidden]`, `[tokens, k]`, `[tokens, k]` → `[tokens, hidden]`."""
        # Unbound once: the gradient of every index into a fused tensor is as large as the tensor.
        first, down = entering(self).unbind(), self.down_proj.unbind()

        def run(expert: int, rows: Tensor) -> Tensor:
            given = activation(self, expert, F.linear(rows, first[expert]))
            return add_bias(self, "down_proj", expert, F.linear(given, down[expert]))

        return weighted_sum(run, hidden_states, top_k_index, top_k_weights)
