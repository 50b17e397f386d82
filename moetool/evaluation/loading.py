"""Loading a model as options say it."""

from typing import Any

from moetool.checkpoint.reader import Checkpoint
from moetool.integrations.loading import load_model
from moetool.pipeline.job import pick_compute_dtype, pick_device


def load_for(checkpoint: Checkpoint, device: str, compute_dtype: str) -> Any:
    """A language model in evaluation mode; `device` may be `map`, to spread a large model over what there is.

    Raises:
        InvalidInputError: transformers cannot load it.
    """
    spread = device == "map"
    chosen = pick_device("auto" if spread else device)
    dtype = pick_compute_dtype(compute_dtype, chosen, next(iter(checkpoint.tensors.values())).dtype)
    return load_model(checkpoint, dtype, "auto" if spread else chosen)
