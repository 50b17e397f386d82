"""Experts that are left, in the bits in which another tool has stored them."""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.writer import TensorSpec
from moetool.format.mlx import MLX
from moetool.job.job import Source


def keeps_format(source: Source) -> bool:
    """Whether fewer experts of a source can be another checkpoint in the format that it is stored in: all experts are
    in it and stored alike, or none is, and routers, whose rows are cut, are not. Of mlx-lm's none is written."""
    forms, architecture, reader = source.checkpoint.forms, source.architecture, source.experts
    if (source.checkpoint.stored_entry or {}).get("quant_method") == MLX:
        return False
    others = forms.keys() - reader.names
    if any(architecture.is_router(layer, name) for layer in reader.moe_layers for name in others):
        return False
    if not reader.names & forms.keys():
        return True
    if reader.names - forms.keys():
        return False
    if architecture.is_fused:
        every = source.checkpoint.stored_parts(reader.names).values()
        unread = any(".experts." in name for name in source.checkpoint.unread)
        return not unread and all(info.shape[:1] == (reader.shape.experts,) for info in every)
    alike = {
        (layer, role, tuple(_shapes(source, architecture.weight_name(layer, expert, role))))
        for layer in reader.moe_layers
        for role in reader.shape.roles
        for expert in range(reader.shape.experts)
    }
    return len(alike) == len(reader.moe_layers) * len(reader.shape.roles)


def has_stored_experts(source: Source) -> bool:
    """Whether experts are to stay in the bits of another tool."""
    first = source.architecture.weight_name(source.experts.moe_layers[0], 0, "down")
    return source.keeps_stored and first in source.checkpoint.forms


def _shapes(source: Source, name: str) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    for part, info in _parts(source, name, name):
        yield _ending(part, name), info.dtype, info.shape


def _ending(part: str, name: str) -> str:
    """What the name of a part has behind that of the module of a matrix."""
    return part.removeprefix(name.removesuffix("weight"))


def _parts(source: Source, name: str, place: str) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors that hold a matrix, under the names that they have for a matrix called `place`."""
    checkpoint, module = source.checkpoint, name.removesuffix("weight")
    beside = [module + ending for ending in _endings(checkpoint.unread) if module + ending in checkpoint.unread]
    for part, info in {**checkpoint.stored_parts([name]), **{own: checkpoint.stored[own] for own in beside}}.items():
        yield place.removesuffix("weight") + _ending(part, name), info


@cache
def _endings(names: frozenset[str]) -> frozenset[str]:
    """What names of tensors end with, behind their modules."""
    return frozenset(name.rpartition(".")[2] for name in names)


def unread_beside(source: Source) -> list[str]:
    """Tensors beside the experts that only another tool's engine reads, which goes on doing so."""
    reader, architecture = source.experts, source.architecture
    modules = tuple({architecture.experts_prefix(layer) for layer in reader.moe_layers})
    return sorted(name for name in source.checkpoint.unread if not name.startswith(modules))


def stored_specs(source: Source, layer: int, kept: int) -> Iterator[TensorSpec]:
    """Headers of the tensors that so many experts of a layer are stored in."""
    for name, place in _names(source, layer, range(kept)):
        for part, info in _parts(source, name, place):
            shape = (kept, *info.shape[1:]) if source.architecture.is_fused else info.shape
            yield TensorSpec(part, info.dtype, shape)


def stored_tensors(source: Source, layer: int, experts: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that these experts of a layer are stored in, by full name on disk, bit by bit the same."""
    chosen = torch.tensor(experts)
    for name, place in _names(source, layer, experts):
        for part, info in _parts(source, name, place):
            tensor = source.checkpoint.read_stored(info.name)
            if source.architecture.is_fused:  # of bytes, since not all dtypes can be indexed
                rows = tensor.view(len(tensor), -1).view(torch.uint8).index_select(0, chosen)
                tensor = rows.view(tensor.dtype).view(len(experts), *tensor.shape[1:])
            yield part, tensor


def _names(source: Source, layer: int, experts: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Name of each matrix of these experts, and the one that it gets as the first, the second and so on."""
    architecture = source.architecture
    for roles in source.experts.shape.groups:
        if architecture.is_fused:
            for together in architecture.together(roles):
                name = architecture.weight_name(layer, 0, together[0])
                yield name, name
            continue
        for role in roles:
            for place, expert in enumerate(experts):
                yield architecture.weight_name(layer, expert, role), architecture.weight_name(layer, place, role)
