"""A killed run goes on with the sums that it began with, whatever memory and threads there are by then."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents, copy_of

from moetool.job.conditions import Conditions
from moetool.job.workspace import is_finished, noted_conditions

GROUP = ("--group-size", "16")
METHODS: dict[str, tuple[object, ...]] = {
    "hybrid": ("hybrid", "--ratio", 0.5, *GROUP, "--merge", "regmean"),
    "hybrid, refined": ("hybrid", "--ratio", 0.5, *GROUP, "--refine", 2),
    "hybrid, included": ("hybrid", "--ratio", 0.5, *GROUP, "--include", "attention,embeddings"),
    "auto": ("auto", "--ratio", 0.5, *GROUP),
    "auto, trellis": ("auto", "--ratio", 0.5, *GROUP, "--trellis"),
    "quantize --ratio": ("quantize", "--ratio", 0.5, *GROUP),
    "quantize --ratio, trellis": ("quantize", "--ratio", 0.5, *GROUP, "--trellis"),
    "quantize --bits": ("quantize", "--bits", 3, *GROUP, "--include", "embeddings"),
    "d2moe": ("d2moe", "--ratio", 0.4),
    "d2moe, factors in codes": ("d2moe", "--ratio", 0.4, "--factor-bits", 8),
    "d2moe, refined": ("d2moe", "--ratio", 0.4, "--refine", 2),
    "ders-quantize": ("ders-quantize", "--bits", 3, *GROUP),
    "reap": ("reap", "--experts", 2),
}
SHARDS = ("--shard-size", "40kB")
KILLS = int(os.environ.get("MOETOOL_TEST_KILLS", "2"))


@pytest.fixture
def arguments(tiny_mixtral_bf16, calibration) -> Callable[[str], tuple[object, ...]]:
    return lambda name: ("compress", tiny_mixtral_bf16, "--method", *METHODS[name], *calibration, *SHARDS)


@pytest.fixture(scope="module")
def alone(crash, tmp_path_factory) -> Callable[..., tuple[dict[str, bytes], int]]:
    """`alone(*arguments)`: what a run writes that nobody disturbs, and in how many changes to its files."""
    made: dict[tuple[object, ...], tuple[dict[str, bytes], int]] = {}

    def make(*arguments: object) -> tuple[dict[str, bytes], int]:
        if arguments not in made:
            output = tmp_path_factory.mktemp("alone") / "model"
            changes = crash.whole(output, arguments)
            made[arguments] = contents(output), changes
        return made[arguments]

    return make


def plan(run_cli: Any, arguments: tuple[object, ...], output: Path, *more: object) -> dict[str, Any]:
    command, source, *options = arguments
    found: dict[str, Any] = run_cli(command, source, output, *options, *more, "--dry-run", "--json").json
    return found


def kills(count: int, names: tuple[str, ...], seed: int) -> list[tuple[str, int, bool]]:
    """Which methods are killed, how far on (in thousandths), and whether they had less memory before, or have after."""
    chosen = random.Random(seed)
    return [(names[place % len(names)], chosen.randrange(20, 980), place % 2 == 0) for place in range(count)]


def check_killed(
    crash: Any,
    run_cli: Any,
    alone: Callable[..., tuple[dict[str, bytes], int]],
    arguments: tuple[object, ...],
    tmp_path: Path,
    share: int,
    less_before: bool,
) -> None:
    """Kill a run, and go on with another --memory: the bytes are those of a run that was left alone. The largest does
    for either number of experts together; where what is there by then is too little, that is said."""
    whole = plan(run_cli, arguments, tmp_path / "dry")
    less = plan(run_cli, arguments, tmp_path / "dry", "--memory", whole["peak_memory_bytes"] - 1)
    assert less["experts_at_once"] < whole["experts_at_once"]
    sizes = [whole["peak_memory_bytes"], whole["peak_memory_bytes"] - 1]
    before, after = (("--memory", size) for size in (reversed(sizes) if less_before else sizes))
    output = tmp_path / "out"
    expected, changes = alone(*arguments, *before)
    at = max(1, share * changes // 1000)
    killed = crash(output, (*arguments, *before), at=at)
    assert killed["code"] == -signal.SIGKILL
    has_begun = Conditions.noted(noted_conditions(output)) is not None and not is_finished(output)
    last = crash(output, (*arguments, *after, "--resume"))
    if has_begun and not less_before:
        assert last["code"] == 4, last["stderr"]
        assert f"It began with {whole['experts_at_once']} experts of a layer in memory together" in last["stderr"]
        last = crash(output, (*arguments, "--resume"))
    elif not has_begun and not is_finished(output):  # nothing was done: the run is one with the memory of now
        expected, _ = alone(*arguments, *after)
    assert last["code"] == 0, last["stderr"]
    assert contents(output) == expected, (at, changes)


@pytest.mark.parametrize(("name", "share", "less_before"), kills(KILLS, tuple(METHODS), 1))
def test_killed_with_one_memory_and_gone_on_with_another(
    crash, run_cli, alone, arguments, tmp_path, name, share, less_before
) -> None:
    check_killed(crash, run_cli, alone, arguments(name), tmp_path, share, less_before)


def test_what_is_free_decides_nothing(run_cli, arguments, tmp_path, monkeypatch) -> None:
    command, source, *options = arguments("hybrid")
    found = set()
    for free in (10**12, 10**10):
        monkeypatch.setattr("moetool.job.plan.free_bytes", lambda free=free: free)
        monkeypatch.setattr("moetool.runtime.memory.free_bytes", lambda device=None, free=free: free)
        found.add(plan(run_cli, (command, source, *options), tmp_path / "dry")["experts_at_once"])
    assert len(found) == 1


def test_it_goes_on_with_the_threads_that_it_began_with(crash, run_cli, arguments, tmp_path, monkeypatch) -> None:
    """And gives them back."""
    command, source, *options = arguments("hybrid")
    output, seen = tmp_path / "out", []
    assert crash(output, (command, source, *options), at=40)["code"] == -signal.SIGKILL
    assert noted_conditions(output) == {"experts_at_once": 4, "threads": 1, "processes": 1}
    again = copy_of(output, tmp_path / "again")

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        from moetool.compress.methods.hybrid import Hybrid

        run = Hybrid.run

        def noting(self: Any, *arguments: Any) -> Any:
            seen.append(torch.get_num_threads())
            return run(self, *arguments)

        monkeypatch.setattr(Hybrid, "run", noting)
        result = run_cli(command, source, again, *options, "--resume")
        assert result.code == 0, result.stderr
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def test_fewer_experts_together_are_not_gone_on_with_by_several_processes(crash, run_cli, arguments, tmp_path) -> None:
    job = arguments("hybrid")
    less = ("--memory", plan(run_cli, job, tmp_path / "dry")["peak_memory_bytes"] - 1)
    assert crash(tmp_path / "out", (*job, *less), at=40)["code"] == -signal.SIGKILL
    told = crash(tmp_path / "out", (*job, "--resume"), ranks=2)
    assert told["codes"] == [2, 2]
    assert "This run was begun by one process, with 2 of 4 experts of a layer in memory" in told["stderr"]
