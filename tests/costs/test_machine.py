"""A machine is measured once; what is kept of that is read, unless it makes no sense."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest
import torch
from pydantic import TypeAdapter

from moetool.costs import machine
from moetool.costs.machine import DeviceSpeeds, DiskSpeeds, Machine, this_machine
from moetool.numerics.work import TIMED_PRECISIONS, Work

CPU = torch.device("cpu")
SPEEDS = {
    "products": {"bfloat16": 4e11, "float32": 4e10, "float64": 2e10, "widened": 8e10},
    "eigen": {100: 0.001, 400: 0.016},
    "cholesky": {100: 0.0001},
    "moved": 1e10,
    "hashed": 1e9,
    "call": 1e-6,
}
CHECKED = TypeAdapter(DeviceSpeeds)
DEVICE = CHECKED.validate_python(SPEEDS)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in order, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MOETOOL_MEASURE", "")
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 0.0)
    found: list[str] = []

    def speeds(device: torch.device) -> DeviceSpeeds:
        found.append(device.type)
        return DEVICE

    def disk(directory: Path) -> DiskSpeeds:
        found.append("disk")
        return DiskSpeeds(read=2e9, written=1e9)

    monkeypatch.setattr(machine, "measured_speeds", speeds)
    monkeypatch.setattr(machine, "measured_disk", disk)
    return found


def kept(tmp_path: Path) -> dict[str, Path]:
    files = {("read" in json.loads(file.read_text())): file for file in (tmp_path / "cache" / "moetool").iterdir()}
    return {"disk": files[True], "device": files[False]}


def test_copies_are_as_fast_as_memory_can_be() -> None:
    found = machine.copy_bandwidth(CPU)
    assert found is not None
    assert 1e8 < found < 1e13
    assert machine.copy_bandwidth(CPU) == found, "measured once"


def test_measured_once(measured: list[str], tmp_path: Path) -> None:
    first = this_machine(CPU, tmp_path / "new" / "output")
    assert measured == ["cpu", "disk"]
    assert this_machine(CPU, tmp_path) == first
    assert measured == ["cpu", "disk"]
    assert (first.read, first.written, first.eigen) == (2e9, 1e9, {100: 0.001, 400: 0.016})


def test_what_is_kept_is_read(measured: list[str], tmp_path: Path) -> None:
    this_machine(CPU, tmp_path)
    kept(tmp_path)["device"].write_text(json.dumps({**SPEEDS, "moved": 3e10}))
    assert this_machine(CPU, tmp_path).moved == 3e10
    assert len(measured) == 2


BAD = [
    *("", "{", "[1, 2]", "null", '{"moved": 1e10}'),
    json.dumps({**SPEEDS, "moved": 0}),
    json.dumps({**SPEEDS, "call": "x"}),
    json.dumps({name: speed for name, speed in SPEEDS.items() if name != "eigen"}),
    json.dumps({**SPEEDS, "eigen": {}}),
    json.dumps({**SPEEDS, "products": {"float32": 4e10}}),
]


@pytest.mark.parametrize("content", BAD)
def test_a_bad_file_is_measured_again(measured: list[str], tmp_path: Path, content: str) -> None:
    whole = this_machine(CPU, tmp_path)
    file = kept(tmp_path)["device"]
    file.write_text(content)
    assert this_machine(CPU, tmp_path) == whole
    assert measured == ["cpu", "disk", "cpu"]
    assert CHECKED.validate_json(file.read_text()) == DEVICE


def test_measured_again_when_asked(measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this_machine(CPU, tmp_path)
    monkeypatch.setenv("MOETOOL_MEASURE", "again")
    this_machine(CPU, tmp_path)
    assert measured == ["cpu", "disk"] * 2


def test_a_busy_machine_is_measured_again_after_an_hour(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 90.0)
    for _ in range(2):
        this_machine(CPU, tmp_path)
    assert measured == ["cpu", "disk"]
    for file in kept(tmp_path).values():
        os.utime(file, (time.time() - 4000,) * 2)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 0.0)
    this_machine(CPU, tmp_path)
    assert measured == ["cpu", "disk"] * 2
    for file in (tmp_path / "cache" / "moetool").iterdir():
        os.utime(file, (time.time() - 40000,) * 2)
    this_machine(CPU, tmp_path)
    assert measured == ["cpu", "disk"] * 2


def test_measured_again_for_other_threads(measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this_machine(CPU, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    this_machine(CPU, tmp_path)
    assert measured == ["cpu", "disk", "cpu"]


def test_not_measured_when_that_is_off(measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETOOL_MEASURE", "off")
    with pytest.raises(OSError, match="MOETOOL_MEASURE=off"):
        this_machine(CPU, tmp_path)
    assert not measured


def test_a_real_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SECONDS", 0.0)
    monkeypatch.setattr(machine, "_PRODUCT", {"cpu": 64})
    monkeypatch.setattr(machine, "_SOLVED", {"cpu": (8, 16)})
    speeds = machine.measured_speeds(CPU)
    assert CHECKED.validate_python(vars(speeds)) == speeds
    assert (set(speeds.products), set(speeds.eigen)) == (set(TIMED_PRECISIONS), {8, 16})
    monkeypatch.setattr(machine, "_DISK", 1 << 20)
    disk = machine.measured_disk(tmp_path)
    assert 0 < min(disk.read, disk.written) <= max(disk.read, disk.written) <= 1e12
    assert not list(tmp_path.iterdir())


def test_coarse_products_take_the_faster_precision() -> None:
    """A processor without products of bf16 multiplies in fp32 what could be rounded."""
    disk = {"read": 1e9, "written": 1e9}
    for bf16, fp32, seconds in ((4e11, 2e10, 1.0), (1e9, 2e10, 20.0)):
        speeds = {**vars(DEVICE), "products": {"bfloat16": bf16, "float32": fp32, "float64": 1e10}}
        assert Machine(**speeds, **disk).seconds(Work({"coarse": 4e11})) == seconds


def test_seconds() -> None:
    here = Machine(**vars(DEVICE), read=2e9, written=1e9)
    work = Work(
        {"float32": 4e10, "bfloat16": 4e11}, {100: 1000.0}, moved=1e10, calls=1e6, hashed=1e9, read=2e9, written=1e9
    )
    assert here.seconds_by_kind(work) == {
        "products": 2.0, "eigen": 1.0, "cholesky": 0.0, "moved": 1.0, "calls": 1.0, "hashed": 1.0, "read": 1.0,
        "written": 1.0,
    }  # fmt: skip
    assert here.seconds(work) == 8.0
    assert here.seconds(work * 2.5) == pytest.approx(20.0)


def test_sizes_between_and_beyond_those_that_were_measured() -> None:
    here = Machine(**vars(DEVICE), read=1.0, written=1.0)
    assert here.seconds(Work(eigen={200: 1.0})) == pytest.approx(0.004)
    assert here.seconds(Work(eigen={400: 1.0})) == pytest.approx(0.016)
    assert here.seconds(Work(eigen={800: 1.0})) == pytest.approx(0.016 * 8)
    assert here.seconds(Work(eigen={50: 1.0})) == pytest.approx(0.00025)
    assert here.seconds(Work(cholesky={1000: 1.0})) == pytest.approx(0.1)
