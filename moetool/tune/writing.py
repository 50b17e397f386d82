"""Writing a model that was trained in memory, in which it stays while one layer after the other is written."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moetool.architectures.layers import decoder_layer
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.writer import TensorSpec
from moetool.errors import InvalidInputError
from moetool.job.job import Job
from moetool.job.shards import by_layer
from moetool.job.writing import passed_on, write_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moetool.training.changed import ChangedModel


class HeldTensors:
    """A model's tensors as its files name and lay them out, made of those in memory one layer at a time.

    Attributes:
        kinds: dtype in memory and shape of each, by name in the files.
    """

    def __init__(self, model: "PreTrainedModel", left_out: frozenset[str]) -> None:
        """Of a model on the processor, without the tensors of some names in memory."""
        self._model = model
        self._layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in model.state_dict().items():
            if name not in left_out:
                self._layers.setdefault(decoder_layer(name), {})[name] = tensor
        self._layer_of: dict[str, str] = {}
        self.kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for layer, held in self._layers.items():
            for name, tensor in self._as_stored({own: tensor.to("meta") for own, tensor in held.items()}).items():
                self._layer_of[name] = layer
                self.kinds[name] = tensor.dtype, tuple(tensor.shape)

    def _as_stored(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, dict(held)))

    def made(self, names: frozenset[str]) -> dict[str, Tensor]:
        """At least those of some names in the files that are the model's."""
        found = dict[str, Tensor]()
        for layer in sorted({self._layer_of[name] for name in names if name in self._layer_of}):
            found |= self._as_stored(self._layers[layer])
        return found


def round_as_written(
    model: "PreTrainedModel", changed: "ChangedModel | None", source: Checkpoint, dtype: torch.dtype
) -> bool:
    """Round what is trained to the numbers that `write_trained`, or `write_changed`, will write, so that its loss is
    that of the files. Returns whether anything is stored in a coarser dtype than the model has in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    if changed is None:
        held = model.state_dict()
        dtypes = _coarser(held, lambda own: revert_weight_conversion(model, own), source, dtype)
        for name, stored in dtypes.items():
            held[name].copy_(held[name].to(stored))
        return bool(dtypes)
    found = dict[str, torch.dtype]()
    for layer in changed.layers:
        found |= _coarser(changed.shapes(layer), changed.on_disk, source, dtype)
    changed.round_to(found)
    return bool(found)


def _coarser(
    held: Mapping[str, Tensor],
    as_stored: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    source: Checkpoint,
    dtype: torch.dtype,
) -> dict[str, torch.dtype]:
    """Dtypes in the files of those tensors in memory that these hold in fewer bits; what the source lacks has `dtype`
    there."""
    found = dict[str, torch.dtype]()
    for name, tensor in held.items():
        stored = as_stored({name: tensor.to("meta")})
        kinds = {source.tensors[own].dtype if own in source.tensors else dtype for own in stored}
        if tensor.is_floating_point() and len(kinds) == 1 and (kind := kinds.pop()).itemsize < 4:
            found[name] = kind
    return found


def write_trained(
    job: Job[Any],
    model: "PreTrainedModel",
    source: Checkpoint,
    config: Mapping[str, object],
    dtype: torch.dtype,
    shard_size: int,
) -> None:
    """Write a model, with the dtypes of its source: what that does not have gets `dtype`."""
    from moetool.runtime.loading import beside_modules, surplus

    tied = getattr(model, "all_tied_weights_keys", None) or {}
    held = HeldTensors(model.to("cpu"), frozenset(name for name in tied if name not in source.tensors))
    specs = []
    # What transformers has no place for, such as a layer that predicts further tokens, stays as it is.
    unused = source.tensors.keys() - held.kinds.keys()
    for name in unused - {*surplus([*unused], source.settings)} | beside_modules(unused, model):
        specs.append(TensorSpec(name, source.tensors[name].dtype, source.tensors[name].shape))
    for name, (own, shape) in held.kinds.items():
        stored = dtype if own.is_floating_point else own
        specs.append(TensorSpec(name, source.tensors[name].dtype if name in source.tensors else stored, shape))
    plan = by_layer(sorted(specs, key=lambda spec: spec.name), shard_size)

    def made(unit: int) -> Iterator[tuple[str, Tensor]]:
        specs = plan.unit(unit)
        tensors = held.made(frozenset(spec.name for spec in specs))
        for spec in specs:
            tensor = tensors[spec.name] if spec.name in tensors else source.read(spec.name)
            yield spec.name, tensor.to(spec.dtype)

    write_checkpoint(job, plan, made, config=config, provenance=passed_on(source))


def stored(changed: "ChangedModel", tensors: Mapping[str, Tensor], source: Checkpoint) -> dict[str, Tensor]:
    """Tensors that a model holds, by the names and in the shapes that they have in a checkpoint's files. Experts may
    lie there as in memory, or with rows and columns exchanged, where transformers would write them in another way.

    Raises:
        InvalidInputError: the files have no such tensor.
    """
    made = changed.on_disk(tensors)
    if not made.keys() <= source.tensors.keys():
        same = {name: tensor for name, tensor in tensors.items() if name in source.tensors}
        made = changed.on_disk({name: tensors[name] for name in tensors.keys() - same.keys()}) | same
    for name, tensor in made.items():
        if name not in source.tensors:
            raise InvalidInputError(f"{source.path} has no tensor {name}, which what is learnt would replace.")
        shape = source.tensors[name].shape
        if tensor.shape != shape and tensor.ndim > 1 and tensor.mT.shape == shape:
            made[name] = tensor.mT
    return made


def layers_by_name(changed: "ChangedModel", source: Checkpoint) -> dict[str, int]:
    """The layer of each tensor in a checkpoint's files that is trained. Raises as `stored`."""
    return {name: layer for layer in changed.layers for name in stored(changed, changed.shapes(layer), source)}


def write_changed(
    job: Job[Any], changed: "ChangedModel", source: Checkpoint, config: Mapping[str, object], shard_size: int
) -> None:
    """Write the source's tensors, those that are trained as they are now, one layer after the other."""
    specs = [TensorSpec(name, info.dtype, info.shape) for name, info in sorted(source.tensors.items())]
    plan = by_layer(specs, shard_size)
    layer_of = layers_by_name(changed, source)

    def made(unit: int) -> Iterator[tuple[str, Tensor]]:
        specs, tensors = plan.unit(unit), dict[str, Tensor]()
        for layer in sorted({layer_of[spec.name] for spec in specs if spec.name in layer_of}):
            tensors |= stored(changed, changed.trained(layer), source)
        for spec in specs:
            tensor = tensors.get(spec.name)
            yield spec.name, (source.read(spec.name) if tensor is None else tensor).to(spec.dtype)

    write_checkpoint(job, plan, made, config=config, provenance=passed_on(source))
