"""Which models processes cannot train in parts."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moetool.checkpoint.reader import Checkpoint
from moetool.costs.coefficients import COEFFICIENTS
from moetool.errors import UsageError
from moetool.format.entry import custom_entry
from moetool.format.kinds.simoe import SimoeSpec
from moetool.numerics.work import Work
from moetool.tune.costs import training_phases
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
