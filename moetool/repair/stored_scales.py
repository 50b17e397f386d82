"""Scales of a model in another tool's format (GPTQ, AWQ, compressed-tensors), which learn while its codes stay."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.stored.matrix import GroupScales
from moetool.job.job import Source
from moetool.numerics.multiples import factors_between
from moetool.runtime.modules.insertion import fused_experts, paths_in
from moetool.training.masters import BlockFactors, Blocks, block_factors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def group_factors(source: Source, model: "PreTrainedModel") -> dict[str, BlockFactors]:
    """Factors of the groups of all matrices that the files hold as codes with scales, by name of the parameters.

    Args:
        source: the model in its files.
        model: the same in memory, in fp32.
    """
    return block_factors(model, _matrices(source, model))


def _matrices(source: Source, model: "PreTrainedModel") -> Iterator[Blocks]:
    architecture, reader, checkpoint = source.architecture, source.experts, source.checkpoint
    for layer, roles, weight in fused_experts(model, architecture):
        held = {architecture.weight_name(layer, one, role) for one in range(reader.shape.experts) for role in roles}
        yield Blocks(weight, _group(checkpoint, held), architecture.in_memory.is_transposed)
    beside = {name: name.removesuffix(".weight") for name in sorted(checkpoint.forms.keys() - reader.names)}
    modules, paths = dict(model.named_modules()), paths_in(model, beside.values())
    for name, path in beside.items():
        if isinstance(module := modules.get(paths[path]), nn.Linear):
            yield Blocks(module.weight, _group(checkpoint, [name]))


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


def stored_scales(checkpoint: Checkpoint, stored: Collection[str]) -> dict[str, tuple[str, GroupScales]]:
    """Scales by their names, of those tensors that stay `stored`, each with the name of its matrix."""
    found = {name: _scales(checkpoint, name) for name in checkpoint.forms}
    return {own.name: (name, own) for name, own in found.items() if own is not None and own.name in stored}


def rescaled(scales: GroupScales, own: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Multiply the numbers of a matrix's `scales` by what its groups were multiplied by.

    Args:
        scales: where they lie, and how.
        own: their numbers in the file.
        old: the matrix [out, in] that they and the codes make.
        new: the matrix that they are to make.
    """
    before, after = (matrix.float().unflatten(-1, (-1, scales.group)) for matrix in (old, new))
    factors = factors_between(before, after)
    return (own.float() * (factors.T if scales.is_turned else factors)).to(own.dtype)
