"""A model loaded as transformers loads it, of which one decoder layer alone is in memory."""

from collections.abc import Collection

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import described_in
from moetool.quiet import quiet
from moetool.runtime.building import building, quantizer_of
from moetool.runtime.loading import refuse_loaded
from moetool.runtime.modules.insertion import path_in


def load_layer(
    checkpoint: Checkpoint, prefix: str | None, dtype: torch.dtype, passed: Collection[str]
) -> PreTrainedModel:
    """The model of a checkpoint through the loader of `from_pretrained`, in evaluation mode on the CPU. Tensors whose
    name begins with `prefix` (`model.layers.3.`) are read; of all others, or of all, only names, shapes and ties are
    checked, and they stay on the meta device. Tensors that were `passed` on from a source need not be known to
    transformers.

    Raises:
        InvalidInputError: transformers cannot build the model, or it has other tensors than the files, in names or
            shapes.
    """
    quantizer = quantizer_of(checkpoint.config)
    with building(checkpoint.config, checkpoint.path, dtype) as model:
        if quantizer is not None:
            quantizer.preprocess_model(model)
    tensors = {
        name: checkpoint.read(name)
        if prefix is not None and name.startswith(prefix)
        else torch.empty(info.shape, dtype=info.dtype, device="meta")
        for name, info in checkpoint.tensors.items()
    }
    loading = LoadStateDictConfig(
        dtype=dtype,
        device_map={"": "meta"} if prefix is None else _devices(model, path_in(model, prefix.removesuffix("."))),
        weight_mapping=get_model_conversion_mapping(model, None, quantizer),
        dtype_plan=model._get_dtype_plan(dtype),
        hf_quantizer=quantizer,
    )
    with quiet(), described_in(checkpoint.path):
        told, _ = convert_and_load_state_dict_in_model(model, tensors, loading)
        told = type(model)._finalize_model_loading(model, loading, told)
        if quantizer is not None:
            model.hf_quantizer = quantizer
            quantizer.postprocess_model(model)
    told.unexpected_keys -= set(passed)
    refuse_loaded(checkpoint, model, told.to_dict())
    return model.eval()


def _devices(model: nn.Module, path: str) -> dict[str, str]:
    """Where transformers is to put each module, the decoder layer at `path` in memory alone. Its neighbors are listed,
    since what is said of `layers.1` also goes for `layers.10` where nothing is said of that."""
    layers = path.rpartition(".")[0]
    others = {f"{layers}.{name}": "meta" for name, _ in model.get_submodule(layers).named_children()}
    return {"": "meta", **others, path: "cpu"}
