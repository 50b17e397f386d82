"""Load a model for evaluation on the device, in the dtype and in the form that options ask for."""

from typing import TYPE_CHECKING

import torch

from moetool.architectures.dense import check_predicts
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import described_in
from moetool.checkpoint.sizes import format_bytes
from moetool.job.job import pick_compute_dtype, pick_device
from moetool.job.progress import Progress, phase
from moetool.measure.options import EvaluatedOptions, GeneratingOptions
from moetool.runtime.building import check_sizes
from moetool.runtime.loading import check_memory, load_model, loading_memory
from moetool.runtime.modules.moefied import set_keep
from moetool.runtime.paging import page_experts
from moetool.runtime.synthesis import SynthesisChoice, apply_synthesis

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WHEN = {"load": "dense when loaded", "on-the-fly": "as they run"}


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of a checkpoint's first floating-point tensor; fp32 if there is none."""
    return next((info.dtype for info in checkpoint.tensors.values() if info.dtype.is_floating_point), torch.float32)


def computed_in(checkpoint: Checkpoint, device: str, compute_dtype: str | torch.dtype) -> torch.dtype:
    """The dtype in which a model runs, as `load_for` with the same arguments loads it."""
    if not isinstance(compute_dtype, str):
        return compute_dtype
    chosen = pick_device("auto" if device == "map" else device)
    return pick_compute_dtype(compute_dtype, chosen, stored_dtype(checkpoint))


def both_fit(one: Checkpoint, other: Checkpoint, device: str, compute_dtype: str) -> bool:
    """Whether two models have room in memory together, as `load_for` loads them."""
    sizes = [loading_memory(each, computed_in(each, device, compute_dtype), _place(device)) for each in (one, other)]
    return sum(size.needed for size in sizes) <= min(size.free for size in sizes)


def _place(device: str) -> torch.device | str:
    return "auto" if device == "map" else pick_device(device)


def load_for(
    checkpoint: Checkpoint,
    device: str,
    compute_dtype: str | torch.dtype,
    progress: Progress,
    *,
    paged: bool = False,
) -> "PreTrainedModel":
    """A language model in evaluation mode; `device` may be `map`, to spread a large model over what there is. What it
    takes of the memory is told to `progress` before, unless its experts are to be paged.

    Raises:
        ResourceError: that is more than there is.
        InvalidInputError: transformers cannot load or run it, or it is an encoder of an unknown family.
    """
    check_predicts(checkpoint.config)
    dtype, place = computed_in(checkpoint, device, compute_dtype), _place(device)
    if not paged:
        memory = check_memory(checkpoint, dtype, place)
        needed, free = format_bytes(memory.needed), format_bytes(memory.free)
        progress.log(f"Loading needs about {needed} of memory, {free} are free.")
    check_sizes(checkpoint)
    with phase(progress, "Load"), described_in(checkpoint.path):
        model = load_model(checkpoint, dtype, place, paged=paged)
        with torch.inference_mode():
            # A config can promise what its layers cannot compute, which none of them says before it runs.
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    return model


def load_to_evaluate(
    checkpoint: Checkpoint, options: EvaluatedOptions, progress: Progress
) -> "tuple[PreTrainedModel, SynthesisChoice]":
    """A model as `load_for` loads it, run as the options say; and when its experts were made dense, and why.

    Raises:
        UsageError: the options do not fit the model.
        ResourceError, InvalidInputError: as `load_for`.
    """
    return _load_to_run(checkpoint, options, options.compute_dtype, progress, few_tokens=False)


def load_to_generate(
    checkpoint: Checkpoint, options: GeneratingOptions, progress: Progress
) -> "tuple[PreTrainedModel, SynthesisChoice]":
    """As `load_to_evaluate`, to run token by token and in the dtype that the model is stored in."""
    dtype = stored_dtype(checkpoint) if options.compute_dtype == "auto" else options.compute_dtype
    model, synthesis = _load_to_run(checkpoint, options, dtype, progress, few_tokens=True)
    if synthesis.needed:
        progress.log(f"Experts are made {_WHEN[synthesis.chosen]}: {synthesis.reason}.")
    return model, synthesis


def _load_to_run(
    checkpoint: Checkpoint,
    options: EvaluatedOptions | GeneratingOptions,
    compute_dtype: str | torch.dtype,
    progress: Progress,
    *,
    few_tokens: bool,
) -> "tuple[PreTrainedModel, SynthesisChoice]":
    paged = options.offload == "experts"
    model = load_for(checkpoint, "cpu" if paged else options.device, compute_dtype, progress, paged=paged)
    if paged:
        page_experts(model, options.memory)
    synthesis = apply_synthesis(model, "on-the-fly" if paged else options.synthesize, few_tokens=few_tokens)
    if options.keep is not None:
        set_keep(model, options.keep)
    return model, synthesis
