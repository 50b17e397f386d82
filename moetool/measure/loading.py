"""Load a model for evaluation on the device, in the dtype and in the form that options ask for."""

from typing import TYPE_CHECKING

import torch

from moetool.architectures.dense import check_predicts
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import described_in
from moetool.checkpoint.sizes import format_bytes
from moetool.job.job import pick_compute_dtype, pick_device
from moetool.job.progress import Progress, phase
from moetool.measure.options import EvaluatedOptions, PagedOptions
from moetool.runtime.building import check_sizes
from moetool.runtime.loading import check_memory, load_model, loading_memory
from moetool.runtime.modules.moefied import set_keep
from moetool.runtime.paging import page_experts
from moetool.runtime.synthesis import Synthesis, SynthesisChoice, apply_synthesis

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    with phase(progress, "Load", 0), described_in(checkpoint.path):
        model = load_model(checkpoint, dtype, place, paged=paged)
        with torch.inference_mode():
            # A config can promise what its layers cannot compute, which none of them says before it runs.
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    return model


def load_paged(
    checkpoint: Checkpoint, options: PagedOptions, compute_dtype: str | torch.dtype, progress: Progress
) -> "PreTrainedModel":
    """A model as `load_for` loads it, with its experts paged if the options say so."""
    paged = options.offload == "experts"
    model = load_for(checkpoint, "cpu" if paged else options.device, compute_dtype, progress, paged=paged)
    if paged:
        page_experts(model, options.memory)
    return model


def unless_paged(options: PagedOptions, synthesize: Synthesis) -> Synthesis:
    """Experts that are paged run as they are stored."""
    return "on-the-fly" if options.offload == "experts" else synthesize


def load_to_evaluate(
    checkpoint: Checkpoint, options: EvaluatedOptions, progress: Progress
) -> "tuple[PreTrainedModel, SynthesisChoice]":
    """A model as `load_for` loads it, run as the options say; and when its experts were made dense, and why.

    Raises:
        UsageError: the options do not fit the model.
        ResourceError, InvalidInputError: as `load_for`.
    """
    model = load_paged(checkpoint, options, options.compute_dtype, progress)
    synthesis = apply_synthesis(model, unless_paged(options, options.synthesize))
    if options.keep is not None:
        set_keep(model, options.keep)
    return model, synthesis
