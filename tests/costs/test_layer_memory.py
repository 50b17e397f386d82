"""How many experts of a layer fit into memory together."""

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from moetool.architectures import MoEShape
from moetool.costs.layer_memory import USABLE, LayerMemory, Measuring, attention_bytes
from moetool.errors import UsageError
from moetool.job.options import RunOptions
from moetool.job.plan import experts_at_once

MEMORY = LayerMemory(
    rest=1000, dense=50, passing=200, expert=10, experts=64, measuring=(Measuring(5, 0, 0), Measuring(40, 6, 30))
)


def test_all_experts_with_everything_at_once() -> None:
    assert MEMORY.nbytes() == MEMORY.nbytes(64) == 1000 + 200 + 64 * 10 + 40 + 64 * 6 + 30


def test_batches_pass_while_no_expert_is_there() -> None:
    assert MEMORY.nbytes(1) == 1000 + 200 + 50  # the batch's way through a dense layer is the peak
    assert MEMORY.nbytes(32) == 1000 + 32 * 10 + 40 + 32 * 6 + 30


@pytest.mark.parametrize(("allowed", "at_once"), [(2294, 64), (2293, 32), (1582, 32), (1581, 22), (1330, 16), (1, 1)])
def test_as_few_sets_as_fit(allowed: int, at_once: int) -> None:
    assert experts_at_once(MEMORY, RunOptions(memory=allowed)) == at_once
    assert allowed == 1 or MEMORY.nbytes(at_once) <= allowed


@pytest.mark.parametrize("available", [10**12, 1582, 0])
def test_what_the_machine_has_unless_told_whatever_is_free(available: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are formed in the order of these sets: two runs of one command choose the same."""
    total = round(1582 / USABLE) + 1
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total, available=available))
    assert experts_at_once(MEMORY, RunOptions()) == 32


def test_a_run_keeps_to_what_it_began_with() -> None:
    assert experts_at_once(MEMORY, RunOptions(memory=2294).keeping(22)) == 22
    assert experts_at_once(MEMORY, RunOptions(memory=1).keeping(64)) == 64
    assert experts_at_once(MEMORY, RunOptions(memory=2294).keeping(None)) == 64
    copied = RunOptions(memory=2294).keeping(22).model_copy(update={"shard_size": 5})
    assert experts_at_once(MEMORY, copied) == 22, "jobs within a job keep to it, too"
    assert "experts_at_once" not in copied.model_dump()


def test_several_processes_hold_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert experts_at_once(MEMORY, RunOptions(memory=1)) == 64
    assert experts_at_once(MEMORY, RunOptions().keeping(64)) == 64
    with pytest.raises(UsageError, match="22 of 64 experts"):
        experts_at_once(MEMORY, RunOptions().keeping(22))


def test_what_is_measured_grows_with_the_experts_only_where_each_has_its_own() -> None:
    shape = MoEShape(experts=8, top_k=2, hidden=64, intermediate=32)
    assert Measuring.fisher(shape).each == 0
    assert Measuring.fisher(shape, regression=True).common > Measuring.fisher(shape).common
    assert Measuring.factors(shape).each == 8 * (64**2 + 32**2)
    assert Measuring.factors(shape, jointly=True).each > Measuring.factors(shape).each
    assert Measuring.factors(shape, linked=True).each - Measuring.factors(shape).each == 4 * 512 * 2 * 32
    wide = replace(shape, experts=256, intermediate=2048)  # one matrix of down stands for all
    assert Measuring.codes(shape).each == 2 * 4 * (64**2 + 32**2)
    assert Measuring.codes(wide).each == 2 * 4 * 64**2


def test_latent_attention_with_narrow_values_forms_all_scores() -> None:
    config = {"num_attention_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    assert attention_bytes(config, windows=2, length=100) == 4 * 2 * 100 * 4 * (3 * 100 + 2 * 40)
    assert attention_bytes({**config, "v_head_dim": 16}, windows=2, length=100) == 4 * 2 * 100 * 4 * 2 * 48
    assert attention_bytes({"num_attention_heads": 4}, windows=2, length=100) == 0
