"""Costs that are known before a job starts."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from moetool.architectures import find_architecture
from moetool.calibration.cutting import DRAWING
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.calibration_cost import CalibrationCost, baseline
from moetool.costs.layer_memory import Measuring
from moetool.errors import ResourceError
from moetool.job.plan import Plan, fingerprint

GB = 1_000_000_000


def plan(**changes: Any) -> Plan:
    costs = {"input_bytes": 10 * GB, "output_bytes": 6 * GB, "scratch_bytes": 2 * GB, "memory_bytes": 3 * GB}
    return Plan(**{"stage": "d2moe", **costs, **changes})


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GB of memory and 100 GB of disk."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * GB))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GB if path.exists() else 0))


def test_a_plan_that_fits(tmp_path: Path) -> None:
    plan().check(tmp_path / "new" / "output", memory=None, disk=None)
    plan().check(tmp_path / "output", memory=3 * GB, disk=8 * GB)


def test_relative_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan().check(Path("new/output"), memory=None, disk=None)


def test_memory_that_is_not_there(tmp_path: Path) -> None:
    told = r"needs about 17\.0 GB of memory and has 16\.0 GB\. Close other programs"
    with pytest.raises(ResourceError, match=told):
        plan(memory_bytes=17 * GB).check(tmp_path, memory=None, disk=None)


def test_memory_that_is_not_allowed(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"needs about 3\.0 GB of memory and has 2\.5 GB"):
        plan().check(tmp_path, memory=2_500_000_000, disk=None)


def test_an_allowance_outweighs_a_guess(tmp_path: Path) -> None:
    plan(memory_bytes=20 * GB).check(tmp_path, memory=20 * GB, disk=None)


@pytest.mark.parametrize("disk", [None, 7 * GB])
def test_disk_that_is_not_there(tmp_path: Path, disk: int | None) -> None:
    scratch = 2 * GB if disk else 95 * GB
    free = "7.0" if disk else "100.0"
    told = rf"disk in .*\(6\.0 GB for the result, {scratch / GB:.1f} GB while it works\) and has {free} GB"
    with pytest.raises(ResourceError, match=told):
        plan(scratch_bytes=scratch).check(tmp_path / "new", memory=None, disk=disk)


def test_what_a_run_has_written_already_counts(tmp_path: Path) -> None:
    """Resuming on a disk that the first attempt has half filled."""
    (tmp_path / ".moetool").mkdir()
    (tmp_path / ".moetool" / "hidden.bin").write_bytes(bytes(600))
    (tmp_path / "model.safetensors").write_bytes(bytes(150))
    small = plan(output_bytes=800, scratch_bytes=200)
    small.check(tmp_path, memory=None, disk=250)
    with pytest.raises(ResourceError, match="has 249 B"):
        small.check(tmp_path, memory=None, disk=249)


def test_exit_code() -> None:
    assert ResourceError.exit_code == 4


def test_json() -> None:
    told = plan(details={"layers": 32}).to_json()
    assert told["disk_bytes"] == 8 * GB
    assert told["peak_memory_bytes"] == 3 * GB
    assert told["layers"] == 32
    assert told["stage"] == "d2moe"


def test_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    one = fingerprint("d2moe", {"input": "a"}, {"ratio": 0.4, "seed": 0})
    assert one == fingerprint("d2moe", {"input": "a"}, {"seed": 0, "ratio": 0.4})
    others = [
        fingerprint("d2moe", {"input": "b"}, {"ratio": 0.4, "seed": 0}),
        fingerprint("d2moe", {"input": "a"}, {"ratio": 0.5, "seed": 0}),
        fingerprint("decompose", {"input": "a"}, {"ratio": 0.4, "seed": 0}),
        fingerprint("d2moe", {"input": "a", "base": "c"}, {"ratio": 0.4, "seed": 0}),
    ]
    monkeypatch.setattr("moetool.job.plan.DRAWING", DRAWING + 1)  # equal options would draw other windows
    others.append(fingerprint("d2moe", {"input": "a"}, {"ratio": 0.4, "seed": 0}))
    assert len({one, *others}) == 6


def test_calibration_costs_grow_with_what_they_depend_on(tiny_mixtral: Path) -> None:
    checkpoint = Checkpoint.open(tiny_mixtral)
    reader = ExpertReader(checkpoint, find_architecture(checkpoint.config))
    cost = CalibrationCost(samples=128, length=64, itemsize=4)
    assert cost.boundary_bytes(32) == 128 * 64 * 32 * 4

    def memory(cost: CalibrationCost, *measuring: Measuring) -> int:
        return cost.layer_memory(reader, *measuring).nbytes()

    whole = sum(info.nbytes for info in checkpoint.tensors.values())
    layers = [
        sum(info.nbytes for name, info in checkpoint.tensors.items() if name.startswith(f"model.layers.{layer}."))
        for layer in range(3)
    ]
    least = memory(CalibrationCost(samples=1, length=1, itemsize=4))
    process = baseline()
    assert whole - sum(layers) + max(layers) <= least - process < whole
    assert cost.layer_memory(reader, gradients=True).nbytes() > memory(cost), "activations wait for the way back"
    assert memory(cost) > least
    assert memory(cost, Measuring.fisher(reader.shape)) > memory(cost)
    assert memory(cost, Measuring.factors(reader.shape)) > memory(cost)
    assert memory(CalibrationCost(samples=10_000, length=64, itemsize=4)) == memory(cost)  # batches, not windows
