"""Construction of the model that a `config.json` describes, on the meta device and with moetool's modules inserted."""

import copy
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moetool.architectures.dense import is_encoder
from moetool.architectures.described import check_language
from moetool.checkpoint.promises import check_shape, lacking
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import described_in, model_config
from moetool.errors import InvalidInputError
from moetool.format.entry import is_quantized_elsewhere
from moetool.format.families import is_opaque
from moetool.format.marker import moetool_entry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moetool.runtime.plugin import MoetoolQuantizer


def empty_model(config: Mapping[str, object], path: Path, dtype: torch.dtype) -> "PreTrainedModel":
    """The model on the meta device as the loader builds it before it reads weights, with the modules of moetool's that
    the entry `quantization_config` lists.

    Raises:
        InvalidInputError: it is no language model, or transformers cannot build it.
    """
    with building(config, path, dtype) as model:
        if (quantizer := quantizer_of(config)) is not None:
            quantizer._process_model_before_weight_loading(model)
    return model


def recomputes(checkpoint: Checkpoint) -> bool:
    """Whether transformers can run the layers of a model again on the way back. Of few families it cannot, and keeps
    what is in each. Raises as `building`."""
    with building(checkpoint.config, checkpoint.path, torch.float32) as model:
        return bool(model.supports_gradient_checkpointing)


def quantizer_of(config: Mapping[str, object]) -> "MoetoolQuantizer | None":
    """The plug-in by which the loader puts moetool's modules into a model, if its config lists some."""
    from moetool.runtime.plugin import MoetoolConfig, MoetoolQuantizer

    entry = moetool_entry(config)
    return None if entry is None else MoetoolQuantizer(MoetoolConfig(**copy.deepcopy(dict(entry))))


@contextmanager
def building(config: Mapping[str, object], path: Path, dtype: torch.dtype) -> "Iterator[PreTrainedModel]":
    """A model on the meta device as its class builds it, and a `with` block in which it may be changed there.

    Raises:
        InvalidInputError: it is no language model, or transformers cannot build it.
    """
    from moetool.runtime.loading import model_class

    described, loader = model_config(config, path), model_class(config)
    if not is_encoder(config):
        check_language(config, described)
    with described_in(path), torch.device("meta"):
        yield loader.from_config(described, dtype=dtype)


def names_on_disk(model: "PreTrainedModel") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor that a model is saved as, by its name there; tied ones once."""
    from transformers.core_model_loading import revert_weight_conversion

    from moetool.runtime.conversions import conversions_of

    state = model.state_dict()
    for tied in getattr(model, "all_tied_weights_keys", None) or {}:
        state.pop(tied, None)
    # Some conversions ask the model for a parameter by name; placeholders of bases are buffers.
    model.get_parameter = state.__getitem__
    model._weight_conversions = conversions_of(model)
    try:
        on_disk = revert_weight_conversion(model, state)
    finally:
        del model.get_parameter, model._weight_conversions
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in on_disk.items()}


def _is_turned(held: tuple[int, ...], promised: tuple[int, ...]) -> bool:
    """Whether experts' matrices lie in one tensor as `[experts, in, out]`, which transformers turns round for those
    families that have them so: of others the loader says."""
    return len(promised) == 3 and held == (promised[0], promised[2], promised[1])


def _of_any_layer(name: str) -> str:
    """The name of a tensor with a star for its layer's number."""
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


def _layer_of(name: str) -> str:
    """The name of a tensor up to its layer's number; all of a name without one."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


def _part_of(name: str) -> str:
    """The layer that a tensor is in, or outside of layers its module."""
    return _layer_of(name) if _is_layered(name) else name.rpartition(".")[0]


def _is_layered(name: str) -> bool:
    """Whether the name of a tensor, or its beginning, has a layer's number."""
    return re.search(r"\.\d+\.", name) is not None


def _without_place(checkpoint: Checkpoint, model: "PreTrainedModel", promised: Collection[str]) -> list[str]:
    """Names in the files that `config.json` does not promise: in parts (`_part_of`) of which all that it promises is
    there, so that they can be no other names of that, and in layers beyond those that it promises.

    Left out is what transformers passes over, such as buffers of its older versions; what is beside the modules is
    carried along, unused."""
    from moetool.runtime.loading import surplus

    held = checkpoint.tensors
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    parts = {_part_of(name) for name in (*promised, *tied)}
    whole = parts - {_part_of(name) for name in promised if name not in held}
    passed = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ["$^"]))
    lists = {_of_any_layer(_layer_of(name)) for name in promised if _is_layered(name)}
    more = [
        name
        for name in held
        if name not in promised and name not in tied and (_part_of(name) in whole or _is_beyond(name, parts, lists))
    ]
    return surplus([name for name in more if not passed.search(name)], checkpoint.settings)


def _is_beyond(name: str, parts: Collection[str], lists: Collection[str]) -> bool:
    """Whether a tensor is in a layer that is in one of the `lists` of layers, but not among the `parts` of a model."""
    return _is_layered(name) and _part_of(name) not in parts and _of_any_layer(_layer_of(name)) in lists


def in_whole(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint under the names that its tensors have in the whole model: in the files the decoder may lie bare
    (`h.0.` for `transformer.h.0.`), as GPT-2 and BLOOM do on the hub. Raises as `building`."""
    model = empty_model(checkpoint.config, checkpoint.path, torch.float32)
    base, promised = model.base_model_prefix, names_on_disk(model)
    others = [name for name in checkpoint.tensors if name not in promised]
    bare = {name.partition(".")[0] for name in others if f"{base}.{name}" in promised}
    infos = [
        replace(info, name=f"{base}.{name}") if name.partition(".")[0] in bare else info
        for name, info in checkpoint.tensors.items()
    ]
    return replace(checkpoint, tensors={info.name: info for info in infos})


def check_sizes(checkpoint: Checkpoint) -> None:
    """Compare the model that `config.json` promises with the headers, before a loader makes room for it.

    Names that the files do not have are the loader's to judge, who knows more names of a tensor than one; but a tensor
    is missing if the files have its like of another layer, and in its own layer none by a name that is not promised.
    So is one outside of the layers, such as the head, if all there have names that are promised. Together absent ones
    may not be more than what the files hold. moetool's own models have the names that it gave them.

    Raises:
        InvalidInputError: transformers cannot build the model, a tensor has another shape than promised, is missing
            in some layers or has no place in its module, or most of what is promised is not there.
    """
    if is_quantized_elsewhere(checkpoint.config):
        return  # another tool's: only that knows what becomes of its tensors
    model = empty_model(checkpoint.config, checkpoint.path, torch.float32)
    promised = names_on_disk(model)
    held = checkpoint.tensors
    for name, (_, shape) in promised.items():
        if name in held and not _is_turned(held[name].shape, shape):
            check_shape(checkpoint.path, name, held[name].shape, shape)
    absent = [name for name, (_, shape) in promised.items() if name not in held and 0 not in shape]
    layered = set(map(_of_any_layer, held))
    needless = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_missing", None) or ["$^"]))
    renamed = {_layer_of(name) for name in held.keys() - promised.keys()}
    absent_alone = [name for name in absent if _layer_of(name) not in renamed and not needless.search(name)]
    is_whole = all(map(_is_layered, renamed))  # outside of the layers no tensor has a name that is not promised
    if missing := [
        name for name in absent_alone if _of_any_layer(name) in layered or (is_whole and not _is_layered(name))
    ]:
        raise lacking(checkpoint.source, missing, held)
    if (absent and is_opaque(checkpoint.config)) or sum(math.prod(promised[name][1]) for name in absent) > sum(
        math.prod(info.shape) for info in held.values()
    ):
        raise lacking(checkpoint.source, absent, held)
    if unused := _without_place(checkpoint, model, promised):
        raise InvalidInputError(
            f"{checkpoint.source} has a tensor {unused[0]}, and the model of its config.json has no place for it "
            f"({len(unused)} such in all): without it results would be wrong. Is config.json that of these weights?"
        )
