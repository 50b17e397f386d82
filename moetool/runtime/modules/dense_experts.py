"""transformers' own fused experts on kernels: `experts_implementation="moetool"`.

For experts that are not compressed. A token's matrices are read where they lie, by the number of its expert: of
transformers' ways `batched_mm` copies them first, `eager` and `grouped_mm` wait for what was chosen or sort it. Where
gradients are wanted, on other devices, and for experts of unusual form, transformers' own ways remain.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moetool.kernels.operands import NUMBERS
from moetool.kernels.products import problem, routed
from moetool.kernels.table import Table
from moetool.representations.operand import numbers

MOETOOL_EXPERTS = "moetool"
_BYTES = 16  # rows of grouped products are whole ones
_FEW = 2  # tokens per expert up to which all products in one are faster than one after the other


def fits_grouped_products(experts: nn.Module) -> bool:
    """Whether torch's grouped products take the shapes of fused experts.

    These want rows of whole 16 bytes, in every matrix and in what it is multiplied with, forward and backward.
    """
    fused = (parameter for parameter in experts.parameters(recurse=False) if parameter.dim() == 3)
    return not any(size * matrices.element_size() % _BYTES for matrices in fused for size in matrices.shape[1:])


def run_dense_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' fused experts: `[tokens, hidden]`, `[tokens, k]`, `[tokens, k]` → `[tokens, hidden]`. Numbers of
    experts that are on other machines count as nothing."""
    if torch.is_grad_enabled() or not _is_usual(experts):
        return _native(experts)(experts, hidden, chosen, weights)
    tokens, k = chosen.shape
    pairs = chosen.reshape(-1)
    entered = chosen_linear(hidden.repeat_interleave(k, 0), pairs, experts.gate_up_proj)
    output = chosen_linear(experts._apply_gate(entered), pairs, experts.down_proj)
    shares = weights.float().masked_fill((chosen < 0) | (chosen >= experts.num_experts), 0)
    return (output.unflatten(0, (tokens, k)) * shares[..., None]).sum(1).to(hidden.dtype)


def _is_usual(experts: Any) -> bool:
    """Gated experts without biases, in the CPU's memory, one after the other."""
    unusual = any(getattr(experts, name, False) for name in ("has_bias", "is_transposed", "has_post_expert_norm"))
    return (
        not unusual
        and getattr(experts, "has_gate", True)
        and all(
            type(matrices) in (nn.Parameter, Tensor)
            and matrices.dtype in NUMBERS
            and matrices.device.type == "cpu"
            and matrices.is_contiguous()
            for matrices in (experts.gate_up_proj, experts.down_proj)
        )
    )


def _native(experts: Any) -> Callable[..., Tensor]:
    """What transformers would take: grouped products, or one expert after the other where these cannot."""
    one_by_one: Callable[..., Tensor] = type(experts).forward.__wrapped__
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"] if fits_grouped_products(experts) else one_by_one


@torch.library.custom_op("moetool::chosen_linear", mutates_args=())
def chosen_linear(inputs: Tensor, chosen: Tensor, matrices: Tensor) -> Tensor:
    """Each input times the matrix that it chose: `[pairs, in]`, `[pairs]`, `[experts, out, in]` → `[pairs, out]`, zero
    where there is no such matrix."""
    if len(chosen) <= _FEW * len(matrices) and not problem(inputs.device):
        return _few(inputs, chosen, matrices).to(inputs.dtype)
    ordered, order = chosen.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(len(matrices) + 1)).tolist()
    output = inputs.new_zeros(len(inputs), matrices.shape[1])
    for expert, (start, end) in enumerate(pairwise(ends)):
        if start < end:
            rows = order[start:end]
            output[rows] = F.linear(inputs[rows], matrices[expert]).to(output.dtype)
    return output


@chosen_linear.register_fake
def _(inputs: Tensor, chosen: Tensor, matrices: Tensor) -> Tensor:
    return inputs.new_empty(inputs.shape[0], matrices.shape[1])


def _few(inputs: Tensor, chosen: Tensor, matrices: Tensor) -> Tensor:
    """In fp32, by a table of no more matrices than were chosen."""
    experts = sorted({expert for expert in chosen.tolist() if 0 <= expert < len(matrices)})
    table = Table([((numbers(matrices[expert]),),) for expert in experts], (matrices.shape[1], matrices.shape[2]), ())
    places = torch.full((len(matrices) + 1,), -1)
    places[experts] = torch.arange(len(experts))
    outside = (chosen < 0) | (chosen >= len(matrices))
    return routed(table, places[chosen.masked_fill(outside, len(matrices))], inputs)


ALL_EXPERTS_FUNCTIONS.register(MOETOOL_EXPERTS, run_dense_experts)
