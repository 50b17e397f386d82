"""Loading a model as options say it."""

from typing import Any

import torch

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes
from moetool.job.job import pick_compute_dtype, pick_device
from moetool.job.progress import Progress
from moetool.runtime.building import check_sizes, described_in
from moetool.runtime.loading import check_memory, load_model


def load_for(checkpoint: Checkpoint, device: str, compute_dtype: str, progress: Progress | None = None) -> Any:
    """A language model in evaluation mode; `device` may be `map`, to spread a large model over what there is. What it
    takes of the memory is told to `progress` before.

    Raises:
        ResourceError: that is more than there is.
        InvalidInputError: transformers cannot load or run it.
    """
    spread = device == "map"
    chosen = pick_device("auto" if spread else device)
    dtype = pick_compute_dtype(compute_dtype, chosen, next(iter(checkpoint.tensors.values())).dtype)
    place = "auto" if spread else chosen
    memory = check_memory(checkpoint, dtype, place)
    if progress is not None:
        needed, free = format_bytes(memory.needed), format_bytes(memory.free)
        progress.log(f"Loading needs about {needed} of memory, {free} are free.")
    check_sizes(checkpoint)
    with described_in(checkpoint.path):
        model = load_model(checkpoint, dtype, place)
        with torch.inference_mode():
            # A config can promise what its layers cannot compute, which none of them says before it runs.
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    return model
