"""A model as its `config.json` describes it: transformers' config, and the model without weights."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moetool.checkpoint.reader import CONFIG, Checkpoint
from moetool.errors import InvalidInputError, MoetoolError
from moetool.format.entry import is_quantized_elsewhere
from moetool.format.families import is_opaque
from moetool.format.marker import moetool_entry
from moetool.runtime.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@contextmanager
def described_in(path: Path) -> Iterator[None]:
    """Whatever transformers raises over the files of a checkpoint's directory in a `with` block is an
    `InvalidInputError`: its validation, and the arithmetic of its modules, have errors of every class."""
    try:
        with quiet():
            yield
    except (MoetoolError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (" ".join(str(error).split())[:300] or type(error).__name__).rstrip(".")
        raise InvalidInputError(
            f"transformers cannot build the model that {path / CONFIG} describes, or cannot run it: {reason}."
        ) from error


def model_config(config: Mapping[str, object], path: Path) -> "PreTrainedConfig":
    """transformers' config of a model, defaults filled in, without its `quantization_config`.

    Raises:
        InvalidInputError: transformers refuses an entry.
    """
    from transformers import AutoConfig

    raw = copy.deepcopy(dict(config))
    raw.pop("quantization_config", None)
    with described_in(path):
        return AutoConfig.for_model(**raw)


def empty_model(config: Mapping[str, object], path: Path, dtype: torch.dtype) -> "PreTrainedModel":
    """The model on the meta device as the loader builds it before it reads weights, with the modules of moetool's that
    the entry `quantization_config` lists.

    Raises:
        InvalidInputError: it is no language model, or transformers cannot build it.
    """
    from moetool.runtime.loading import model_class

    described, loader = model_config(config, path), model_class(config)
    if type(described) not in loader._model_mapping:
        raise InvalidInputError(
            f"{path / CONFIG} is no language model by itself ({config.get('model_type')}): it is something else, "
            "or has others around it. moetool takes language models alone."
        )
    with described_in(path), torch.device("meta"):
        model = loader.from_config(described, dtype=dtype)
        if (entry := moetool_entry(config)) is not None:
            from moetool.runtime.plugin import MoetoolConfig, MoetoolQuantizer

            MoetoolQuantizer(MoetoolConfig(**copy.deepcopy(dict(entry))))._process_model_before_weight_loading(model)
    return model


def names_on_disk(model: "PreTrainedModel") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor that a model is saved as, by its name there; tied ones once."""
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict()
    for tied in getattr(model, "all_tied_weights_keys", None) or {}:
        state.pop(tied, None)
    on_disk = revert_weight_conversion(model, state)
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in on_disk.items()}


def check_sizes(checkpoint: Checkpoint) -> None:
    """Compare the model that `config.json` promises with the headers, before a loader makes room for it.

    Names that the files do not have are the loader's to judge, who knows more names of a tensor than one; but together
    they may not be more than what the files hold. moetool's own models have the names that it gave them.

    Raises:
        InvalidInputError: transformers cannot build the model, a tensor has another shape than promised, or most of
            what is promised is not there.
    """
    if is_quantized_elsewhere(checkpoint.config):
        return  # another tool's: only that knows what becomes of its tensors
    promised = names_on_disk(empty_model(checkpoint.config, checkpoint.path, torch.float32))
    held = checkpoint.tensors
    for name, (_, shape) in promised.items():
        if name in held and held[name].shape != shape:
            raise InvalidInputError(
                f"Tensor {name} of {checkpoint.path} has shape {list(held[name].shape)}, config.json promises "
                f"{list(shape)}."
            )
    absent = [name for name in promised if name not in held]
    if (absent and is_opaque(checkpoint.config)) or sum(math.prod(promised[name][1]) for name in absent) > sum(
        math.prod(info.shape) for info in held.values()
    ):
        raise InvalidInputError(
            f"{len(absent)} tensors that config.json promises are missing from {checkpoint.path}, among them "
            f"{absent[0]} {list(promised[absent[0]][1])}."
        )
