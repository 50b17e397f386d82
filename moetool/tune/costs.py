"""Costs of training a model: steps of the optimizer, and writing the result."""

import math

from moetool.architectures.base import EXPERT_KEYS, TOP_K_KEYS, whole_number
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.building_blocks import writing
from moetool.costs.coefficients import COEFFICIENTS
from moetool.costs.phases import WRITE, Phase, Phases
from moetool.numerics.work import Work

TRAIN = "Train"


def training_phases(
    checkpoint: Checkpoint, tokens: int, steps: int, trained: int, *, bf16: bool, again: bool
) -> Phases:
    """The phases of a training of so many tokens in so many steps that moves `trained` numbers of a checkpoint; `again`
    if forwards are made twice for less memory."""
    work = _training_work(checkpoint, tokens, steps, trained, bf16=bf16, again=again)
    return Phase(TRAIN, work), Phase(WRITE, writing(0, checkpoint.weight_bytes, len(checkpoint.tensors)))


def _training_work(checkpoint: Checkpoint, tokens: int, steps: int, trained: int, *, bf16: bool, again: bool) -> Work:
    """Forwards, backwards and optimizer steps on so many tokens; `again` if forwards are made twice for less memory."""
    config, tensors = checkpoint.settings, checkpoint.tensors
    numbers = {name: math.prod(info.shape) for name, info in tensors.items()}
    routed = sum(count for name, count in numbers.items() if ".experts." in name)
    share = (whole_number(config, *TOP_K_KEYS) or 1) / (whole_number(config, *EXPERT_KEYS) or 1)
    active = sum(numbers.values()) - routed * (1 - min(1.0, share))
    layers = whole_number(config, "num_hidden_layers") or 1
    made, width = COEFFICIENTS, whole_number(config, "hidden_size") or 0
    times = 1 + made.backward + again
    return Work(
        products={"bfloat16" if bf16 else "float32": times * tokens * active},
        moved=times * tokens * layers * made.passes * width * 4 + steps * 40 * trained,
        calls=steps * (times * layers * made.layer_calls + 10 * len(tensors)),
        read=checkpoint.weight_bytes,
    )
