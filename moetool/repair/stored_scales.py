"""Scales of a model in another tool's format (GPTQ, AWQ, compressed-tensors), which learn while its codes stay."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moetool.architectures.shape import fused_name
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.stored.matrix import GroupScales
from moetool.job.job import Source
from moetool.repair.masters import BlockFactors
from moetool.runtime.modules.insertion import path_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TINY = 1e-30


def group_factors(source: Source, model: "PreTrainedModel") -> dict[str, BlockFactors]:
    """Factors of the groups of all matrices that the files hold as codes with scales, by name of the parameters.

    Args:
        source: the model in its files.
        model: the same in memory, in fp32.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = dict[str, BlockFactors]()
    for weight, stored, is_transposed in _matrices(source, model):
        if isinstance(weight, nn.Parameter) and (group := _group(source.checkpoint, stored)) is not None:
            found[names[id(weight)]] = BlockFactors(weight, group, is_transposed=is_transposed)
    return found


def _matrices(source: Source, model: "PreTrainedModel") -> Iterator[tuple[object, Collection[str], bool]]:
    """Parameters in memory, the names of the matrices of the files in each, and whether they lie turned there."""
    architecture, reader = source.architecture, source.experts
    for layer in reader.moe_layers:
        experts = model.get_submodule(path_in(model, f"{architecture.layer_path(layer)}.{architecture.experts_module}"))
        for roles in reader.shape.groups:
            held = {architecture.weight_name(layer, one, role) for one in range(reader.shape.experts) for role in roles}
            weight = getattr(experts, fused_name(roles), None)
            yield weight, held, architecture.in_memory.is_transposed
    modules = dict(model.named_modules())
    for name in source.checkpoint.forms.keys() - reader.names:
        module = modules.get(path_in(model, name.removesuffix(".weight")))
        if isinstance(module, nn.Linear):
            yield module.weight, [name], False


def _group(checkpoint: Checkpoint, names: Collection[str]) -> int | None:
    """The number of inputs that share a scale in all of these matrices; `None` unless they agree."""
    scales = [_scales(checkpoint, name) for name in names]
    sizes = {None if own is None else own.group for own in scales}
    return sizes.pop() if len(sizes) == 1 else None


def _scales(checkpoint: Checkpoint, name: str) -> GroupScales | None:
    """Scales of a matrix's groups in 16 bits or more: those in 8 are too coarse for what a repair moves."""
    found = checkpoint.scales_of(name)
    dtype = None if found is None else checkpoint.on_disk[found.name].dtype
    return found if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1 else None


def scale_names(checkpoint: Checkpoint, stored: Collection[str]) -> dict[str, str]:
    """Names of matrices by those of their scales, which are among the tensors that stay `stored`."""
    found = {name: _scales(checkpoint, name) for name in checkpoint.forms}
    return {own.name: name for name, own in found.items() if own is not None and own.name in stored}


def scaled(checkpoint: Checkpoint, name: str, new: Tensor) -> Tensor:
    """The scales with which a matrix's codes stand for `new` [out, in], which differs from what they stand for in the
    files by factors of groups."""
    found = checkpoint.scales_of(name)
    assert found is not None
    own = checkpoint.read_stored(found.name)
    old, new = (matrix.float().unflatten(-1, (-1, found.group)) for matrix in (checkpoint.read(name), new))
    energy = old.square().sum(-1)
    factors = torch.where(energy > 0, (new * old).sum(-1) / energy.clamp_min(_TINY), 1)
    return (own.float() * (factors.T if found.is_turned else factors)).to(own.dtype)
