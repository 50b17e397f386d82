"""Which models processes cannot train in parts."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from kinds import save_kind
from torch import Tensor
from transformers import AutoModelForCausalLM

from moetool.checkpoint.reader import Checkpoint
from moetool.costs.coefficients import COEFFICIENTS
from moetool.errors import UsageError
from moetool.format.entry import custom_entry
from moetool.format.kinds.simoe import SimoeSpec
from moetool.numerics.work import Work
from moetool.runtime.modules.quantized_in_model import quantized_modules
from moetool.tune.checks import trained_by
from moetool.tune.choice import choose, decoded_numbers
from moetool.tune.costs import Learning, training_phases, weights_memory
from moetool.tune.options import TuneOptions
from moetool.tune.stage import Tune


def test_what_is_constrained_as_a_whole_is_not_shared_out() -> None:
    config: dict[str, object] = {"quantization_config": None}
    stage = SimpleNamespace(
        options=TuneOptions(data="text.txt"), source=SimpleNamespace(checkpoint=SimpleNamespace(config=config))
    )
    Tune._check_sharding(cast(Any, stage), "ZeRO 2")
    config["quantization_config"] = custom_entry(SimoeSpec(experts=2, router_width=4, sparsity=0.5, channels=None))
    with pytest.raises(UsageError, match="SIMoE's masks are constrained as a whole, and ZeRO 2 has them in parts"):
        Tune._check_sharding(cast(Any, stage), "ZeRO 2")


def test_the_work_of_a_step_is_what_it_computes(tiny_mixtral: Path) -> None:
    """Forwards, backwards to the inputs, and to the weights that learn; the longer rows are, the more of attention."""
    checkpoint = Checkpoint.open(tiny_mixtral)
    numbers = sum(math.prod(info.shape) for info in checkpoint.tensors.values())

    def work(*, trained: int = numbers, length: int = 64, again: bool = False) -> Work:
        phases = training_phases(checkpoint, 640, length, 1, trained, bf16=False, again=again, chooses=False)
        return phases[0].work

    frozen, whole, again = (each.products["float32"] for each in (work(trained=0), work(), work(again=True)))
    forward = again - whole
    assert frozen == pytest.approx((1 + COEFFICIENTS.backward) * forward)
    assert 0.8 * forward < whole - frozen < forward
    assert work(length=128).products["float32"] > whole
    assert work(length=128).moved > work().moved


@pytest.mark.parametrize("train", ["auto", "all"])
@pytest.mark.parametrize("kind", ["beside", "beside-tied"])
def test_codes_take_their_own_bytes_and_those_of_what_is_kept_of_them(
    kind: str, train: Literal["auto", "all"], tmp_path: Path
) -> None:
    """In fp32 is what is stored in numbers, and what is decoded of codes for all tokens until the way back."""
    checkpoint = Checkpoint.open(save_kind(kind, tmp_path))
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    held = [*model.parameters(), *(own for name, own in model.named_buffers() if name.endswith("codes"))]
    stored = sum(tensor.nbytes for tensor in held)
    assert weights_memory(checkpoint, Learning(0), torch.float32, 1, streams=False) == stored

    options = TuneOptions(data="text.txt", train=train)
    learning = trained_by(options, checkpoint)
    expected = stored + 12 * learning.numbers + 4 * learning.decoded
    assert weights_memory(checkpoint, learning, torch.float32, 1, streams=False) == expected
    choose(model, train, freeze_shared=False)
    coded = [module for _, module in quantized_modules(model)]
    sizes, own = {math.prod(module.matrix_shape()) for module in coded}, {tensor.data_ptr() for tensor in held}
    kept = dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() in sizes and tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=torch.arange(1, 12)[None]).logits
    assert logits.requires_grad
    # What no gradient goes through, before anything that is trained, is not kept.
    is_trained = any(own.requires_grad for own in model.get_input_embeddings().parameters())
    before = 0 if is_trained else decoded_numbers(model)["model.layers.0"]
    assert learning.decoded == sum(kept.values()) + before > before
    assert (
        trained_by(options.model_copy(update={"gradient_checkpointing": True}), checkpoint).decoded < learning.decoded
    )
