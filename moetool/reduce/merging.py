"""Merging of experts: weighted sums of their matrices with neurons matched, and the router's rows that stay."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from moetool.architectures import MoEShape, Role
from moetool.checkpoint.experts import Weights
from moetool.job.job import Source
from moetool.reduce.choosing import Merged
from moetool.reduce.plan import rows_kept, whole_dtype
from moetool.reduce.stored import has_stored_experts, stored_tensors


def layer_tensors(source: Source, layer: int, left: Sequence[Merged], *, align: bool) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of an MoE layer's merged experts and router, by full name on disk. With `align`, neurons
    of merged experts are matched first. The router keeps the rows of the first members, because means of rows lose
    more."""
    reader = source.experts
    weights = partial(reader.dense, layer)
    orders = neuron_orders(reader.shape, weights, left) if align else {}
    if are_stored := has_stored_experts(source):
        yield from stored_tensors(source, layer, [merged.members[0] for merged in left])
    dtypes = {role: whole_dtype(reader, layer, role) for role in reader.shape.roles}
    for roles in reader.shape.groups:

        def matrix(role: Role, place: int) -> Tensor:
            return merged_matrix(weights, role, left[place], orders, dtypes[role])

        def bias(role: Role, place: int) -> Tensor:
            apart = {} if role == "down" else orders  # its outputs are no neurons
            return merged_matrix(partial(reader.bias, layer), role, left[place], apart, reader.dtype)

        if not are_stored:
            yield from reader.native_tensors(layer, roles, len(left), matrix)
        yield from reader.bias_tensors(layer, roles, len(left), bias)
    for name in source.checkpoint.tensors:
        if source.architecture.is_router(layer, name):
            experts = [merged.members[0] for merged in left]
            yield name, rows_kept(source.checkpoint.read(name), source.architecture, experts)


def merged_matrix(
    weights: Weights, role: Role, merged: Merged, orders: dict[int, Tensor], dtype: torch.dtype
) -> Tensor:
    """One matrix `[out, in]` or bias `[out]` of a merged expert: the weighted sum of its members; the original's
    numbers for a single one."""
    if len(merged.members) == 1:
        return weights(merged.members[0], role).to(dtype)
    total: Tensor | None = None
    for expert, share in zip(merged.members, merged.shares, strict=True):
        own = weights(expert, role).float()
        if (order := orders.get(expert)) is not None:
            own = own[:, order] if role == "down" else own[order]
        total = share * own if total is None else total.add_(own, alpha=share)
    assert total is not None
    return total.to(dtype)


def neuron_orders(shape: MoEShape, weights: Weights, left: Sequence[Merged]) -> dict[int, Tensor]:
    """Find, for each expert that is merged into another, the order of its neurons that fits those of the other, by
    expert."""
    return {
        expert: matching_neurons(shape, partial(weights, merged.members[0]), partial(weights, expert))
        for merged in left
        for expert in merged.members[1:]
    }


def matching_neurons(shape: MoEShape, reference: Callable[[Role], Tensor], other: Callable[[Role], Tensor]) -> Tensor:
    """Match the neurons of one expert to those of `reference`: the order `[intermediate]` with the least squared
    distance over all matrices, a linear assignment that maximizes the sum of inner products (M-SMoE, §3.2; Git
    Re-Basin)."""
    from scipy.optimize import linear_sum_assignment

    products = torch.zeros(shape.intermediate, shape.intermediate)
    for role in shape.roles:
        ours, theirs = reference(role).float(), other(role).float()
        products += ours.T @ theirs if role == "down" else ours @ theirs.T
    return torch.from_numpy(linear_sum_assignment(products.numpy(), maximize=True)[1])
