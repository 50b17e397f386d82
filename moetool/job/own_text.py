"""Calibration text that a job's own model writes (`--calibration self`): its cost, and how it is made, once per job.

It takes the whole model in memory, while all else goes through it layer by layer. Tokens wait in the work directory: a
resumed job goes on with them, and all its processes read them there.
"""

import math
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moetool.architectures.base import whole_number
from moetool.architectures.dense import is_encoder
from moetool.calibration.data import SELF, DataSpec, parse_data
from moetool.calibration.mixing import most_windows
from moetool.calibration.opening import opening_of
from moetool.calibration.own_text import sampled_windows, windows_at_once
from moetool.calibration.windows import OwnText, load_tokenizer
from moetool.checkpoint.files import atomically
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.building_blocks import ModelSize, dense_size, loading, moe_size
from moetool.costs.calibration_cost import baseline
from moetool.costs.coefficients import COEFFICIENTS
from moetool.costs.phases import Phase
from moetool.errors import UsageError
from moetool.job.job import DenseSource, Job, pick_compute_dtype, pick_device
from moetool.job.options import TextOptions
from moetool.job.plan import Plan
from moetool.job.progress import phase
from moetool.job.stage import AnyStage
from moetool.numerics.work import Work
from moetool.runtime.loading import load_model, loading_memory

SAMPLE = "Sample"


def planned(stage: AnyStage) -> Plan:
    """The plan of a stage on as many windows as its texts can have, and what its model's own text takes if the
    calibration text has some.

    Raises:
        UsageError: the model is an encoder.
        MoetoolError: as `stage.plan`.
    """
    options, source = stage.options, stage.source
    if not isinstance(options, TextOptions) or options.calibration is None:
        return stage.plan()
    most = most_windows(options.calibration, options.sequence_length, options.mix)
    if most is not None and 0 < most < options.samples:
        with suppress(UsageError):  # where these are too few the job says so, of the text
            return _with_fewer_windows(stage, most)
    plan = stage.plan()
    if not _weight(options):
        return plan
    checkpoint = source.checkpoint
    if is_encoder(checkpoint.config):
        raise UsageError(f"--calibration {SELF}: an encoder writes no text. Give a file, or bundled.")
    device = pick_device(stage.options.device)
    dtype = pick_compute_dtype(stage.options.compute_dtype, device, source.dtype)
    windows, length = math.ceil(options.samples * _weight(options)), options.sequence_length
    size = dense_size(source.dense) if isinstance(source, DenseSource) else moe_size(source.experts)
    work = _work(size, windows, length, dtype)
    memory = 0 if device.type == "cuda" else _memory(checkpoint, windows, length, dtype)  # cards are looked at then
    return replace(
        plan,
        memory_bytes=max(plan.memory_bytes, memory),
        phases=(Phase(SAMPLE, work), *plan.phases) if plan.phases else (),
        details={**plan.details, "own_text_memory_bytes": memory},
    )


def _with_fewer_windows(stage: AnyStage, most: int) -> Plan:
    """The plan of a stage on `most` windows, which says so. The job itself shares out what was asked for."""
    smaller = copy(stage)
    smaller.options = stage.options.model_copy(update={"samples": most})
    plan = smaller.plan()
    said = f"The texts have {most:,} windows at most, by their bytes: disk, memory and time are for these."
    notes = [str(note) for note in (plan.details.get("note"), said) if note is not None]
    return replace(plan, details={**plan.details, "note": " ".join(notes)})


def own_text(job: Job[Any], options: TextOptions) -> OwnText:
    """Source of calibration windows that the job's own model writes; all processes call it, in the same order."""

    def windows(spec: DataSpec, count: int, length: int) -> Tensor:
        name = f"own-text-{'-'.join(map(str, spec.temperatures))}-{count}x{length}"
        file = job.work / f"{name}.safetensors"
        if job.unit(name):
            tokenizer = load_tokenizer(job.source.checkpoint.path)
            with phase(job.progress, SAMPLE, -(-count // windows_at_once(length)), "batches of windows"):
                model = load_model(job.source.checkpoint, job.compute_dtype, job.device)
                made = sampled_windows(
                    model,
                    tokenizer,
                    windows=count,
                    length=length,
                    temperatures=spec.temperatures,
                    opening=opening_of(tokenizer, options.bos),
                    seed=options.seed,
                    tick=job.progress.advance,
                )
            del model
            with atomically(file) as temporary:
                save_file({"windows": made}, temporary)
            job.finish(name)
        job.meet()
        return load_file(file)["windows"]

    return windows


def blank_text(spec: DataSpec, count: int, length: int) -> Tensor:
    """Windows in place of those of a model's own text, where only the other texts are looked at."""
    return torch.zeros(count, length, dtype=torch.int64)


def _weight(options: TextOptions) -> float:
    """The share of the windows that the model writes itself."""
    specs = parse_data(options.calibration) if options.calibration else ()
    return sum(spec.weight for spec in specs if spec.is_self) / math.fsum(spec.weight for spec in specs) if specs else 0


def _memory(checkpoint: Checkpoint, windows: int, length: int, dtype: torch.dtype) -> int:
    """Peak bytes of anonymous memory: the model, the keys and values of a batch, and some copies of its logits."""
    settings, rows = checkpoint.settings, min(windows, windows_at_once(length))
    layers, hidden, vocabulary = (
        whole_number(settings, key) or 0 for key in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    heads = whole_number(settings, "num_attention_heads") or 1
    width = (whole_number(settings, "num_key_value_heads") or heads) * (
        whole_number(settings, "head_dim") or hidden // heads
    )
    cache = 2 * layers * rows * length * width * dtype.itemsize
    return baseline() + loading_memory(checkpoint, dtype).needed + cache + 4 * 4 * rows * vocabulary


def _work(size: ModelSize, windows: int, length: int, dtype: torch.dtype) -> Work:
    """The work of generating one token after the other for all windows of a batch; every step reads all weights."""
    steps = -(-windows // windows_at_once(length)) * length
    active = size.active + size.hidden * size.vocabulary
    return loading(size) + Work(
        products={"bfloat16" if dtype.itemsize == 2 else "float32": windows * length * active},
        moved=steps * size.numbers * dtype.itemsize,
        calls=steps * (size.layers * COEFFICIENTS.layer_calls + size.experts * COEFFICIENTS.expert_calls),
    )
