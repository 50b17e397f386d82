"""Loading a model through transformers, quietly."""

from typing import Any

import torch

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.integrations.model_class import model_class
from moetool.integrations.quiet import quiet
from moetool.pipeline.job import pick_compute_dtype, pick_device


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A language model in evaluation mode; `device` may be a device map such as `"auto"`.

    Raises:
        InvalidInputError: transformers cannot load it.
    """
    try:
        with quiet():
            model = model_class(checkpoint.config).from_pretrained(
                checkpoint.path, dtype=dtype, device_map=device, trust_remote_code=False
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InvalidInputError(f"transformers cannot load {checkpoint.path}: {error}") from error
    return model.eval()


def load_for(checkpoint: Checkpoint, device: str, compute_dtype: str) -> Any:
    """The same as options say it: `device` may be `map`, to spread a large model over what there is."""
    spread = device == "map"
    chosen = pick_device("auto" if spread else device)
    dtype = pick_compute_dtype(compute_dtype, chosen, next(iter(checkpoint.tensors.values())).dtype)
    return load_model(checkpoint, dtype, "auto" if spread else chosen)
