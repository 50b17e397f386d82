"""Costs of training a model: steps of the optimizer, and writing the result."""

import math
from typing import NamedTuple

import torch

from moetool.architectures.base import EXPERT_KEYS, TOP_K_KEYS, whole_number
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.building_blocks import writing
from moetool.costs.coefficients import COEFFICIENTS
from moetool.costs.phases import WRITE, Phase, Phases
from moetool.numerics.work import Work
from moetool.runtime.loading import loading_memory

TRAIN = "Train"
CHOOSE = "Choose experts"
EVALUATION = "Evaluate"  # on held-out examples, at the end
COUNTED_AT_ONCE = 4096  # tokens that choices of experts are counted on at once
# Of a matrix that is changed, while its layer runs: the sum and its gradient; and bytes per number of their pieces.
_MADE, _PIECES = 2, 2
COUNTED = 32_768  # tokens of the examples on which choices of experts are counted


class Learning(NamedTuple):
    """What is trained of a model.

    Attributes:
        numbers: how many, those of low-rank factors among them; with `--train task-experts`, whose choice the examples
            make, at most.
        changed: with `--train lora`, how many numbers the matrices of the largest layer have that are changed.
        decoded: how many numbers made of codes are in memory at once.
    """

    numbers: int
    changed: int = 0
    decoded: int = 0


def weights_memory(
    checkpoint: Checkpoint, learning: Learning, dtype: torch.dtype, layers: int, *, streams: bool
) -> int:
    """Bytes of a model's weights while it is trained.

    Args:
        checkpoint: of the model.
        learning: what is trained of it, in fp32, with its gradient and two means of Adam.
        dtype: of what is not. Codes stay as they are stored.
        layers: of how many what is made of their matrices is in memory at once.
        streams: whether only one layer is in memory beside what is trained and what is in no layer.
    """
    memory = loading_memory(checkpoint, dtype)
    held = memory.needed - memory.layer
    made = layers * (_MADE * dtype.itemsize + _PIECES) * learning.changed + dtype.itemsize * learning.decoded
    if not learning.changed:
        return held + (16 - dtype.itemsize) * learning.numbers + made
    if not streams:
        return held + 16 * learning.numbers + made
    return memory.outside + 2 * memory.layer + 16 * learning.numbers + made


def training_phases(
    checkpoint: Checkpoint,
    tokens: int,
    length: int,
    steps: int,
    trained: int,
    *,
    bf16: bool,
    again: bool,
    chooses: bool,
    teacher: Checkpoint | None = None,
    read: int = 0,
    held_out: int = 0,
    evaluations: int = 0,
) -> Phases:
    """The phases of a training of so many tokens, in rows of a `length`, in so many steps, that moves `trained` numbers
    of a checkpoint; `again` if forwards are made twice for less memory, `chooses` if the experts that learn are chosen
    before. A `teacher` sees all tokens, too. Layers' weights are `read` so often. So many `evaluations` on `held_out`
    tokens are made before and between the steps, and one after them."""
    made = COEFFICIENTS
    work = _training_work(checkpoint, tokens, length, steps, trained, 1 + made.backward + again, bf16=bf16)
    if teacher is not None:
        work += _training_work(teacher, tokens, length, steps, 0, 1, bf16=bf16)
    if read:
        layers = whole_number(checkpoint.settings, "num_hidden_layers") or 1
        numbers = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
        each = Work(moved=made.load_bytes * numbers, calls=layers * made.load_calls[0], read=checkpoint.weight_bytes)
        work += each * read
    choosing = _training_work(checkpoint, COUNTED, length, COUNTED // COUNTED_AT_ONCE, 0, 1, bf16=False)
    evaluating = _training_work(checkpoint, held_out, length, -(-held_out // length), 0, 1, bf16=False)
    if held_out:
        work += evaluating * evaluations
    return (
        *([Phase(CHOOSE, choosing)] if chooses else ()),
        Phase(TRAIN, work + Work(calls=made.open_calls)),
        *([Phase(EVALUATION, evaluating)] if held_out else ()),
        Phase(WRITE, writing(0, checkpoint.weight_bytes, len(checkpoint.tensors))),
    )


def _training_work(
    checkpoint: Checkpoint, tokens: int, length: int, steps: int, trained: int, times: float, *, bf16: bool
) -> Work:
    """Work of so many steps on so many tokens, in rows of a `length`, that take `times` as much as a forward, and move
    `trained` numbers. Each matrix of n numbers gives a token about n / width numbers, which are then read and written
    a third as often as a hidden state in all of a layer: it has at least three matrices."""
    config, tensors = checkpoint.settings, checkpoint.tensors
    numbers = {name: math.prod(info.shape) for name, info in tensors.items()}
    routed = sum(count for name, count in numbers.items() if ".experts." in name)
    share = (whole_number(config, *TOP_K_KEYS) or 1) / (whole_number(config, *EXPERT_KEYS) or 1)
    active = sum(numbers.values()) - routed * (1 - min(1.0, share))
    layers = whole_number(config, "num_hidden_layers") or 1
    made, width = COEFFICIENTS, whole_number(config, "hidden_size", "n_embd") or 1
    heads = whole_number(config, "num_attention_heads", "n_head") or -(-width // 64)
    gradients = active * min(1.0, trained / max(1, sum(numbers.values())))  # of what is trained, beside those of inputs
    products = times * (active + layers * length * width) + gradients
    passed = times * (4 * made.passes / 3 * active / width + made.score_bytes * layers * heads * length)
    passed /= 2 if bf16 else 1
    return Work(
        products={"bfloat16" if bf16 else "float32": made.narrow * tokens * products},
        moved=tokens * passed + steps * 40 * trained,
        calls=steps * (times * layers * made.layer_calls + 10 * len(tensors)),
        read=checkpoint.weight_bytes,
    )
