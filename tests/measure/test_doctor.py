"""`moetool doctor`: what is there, what is missing, what is broken."""

import re
import shutil
import sys
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moetool.compiled import compiler
from moetool.costs.machine import Machine
from moetool.measure import hardware
from moetool.measure.doctor import EXTRAS, LEAST_BYTES, REQUIRED, doctor
from moetool.numerics.work import PRECISIONS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What is said to be installed instead of what is; `None` for what is missing."""
    changed: dict[str, str | None] = {}
    installed = metadata.version

    def version(name: str) -> str:
        if (found := changed.get(name, installed(name))) is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    return changed


def test_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text().lower(), re.M))
    assert project["dependencies"] == [
        f"{name}>={least}{f',<{below}' if below else ''}" for name, (least, below, _) in REQUIRED.items()
    ]
    assert {name: version for name, (*_, version) in REQUIRED.items()} == {name: tested[name] for name in REQUIRED}
    extras = project["optional-dependencies"]
    assert {name for name in extras if name != "dev"} == {extra for extra, *_ in EXTRAS.values()}
    for name, (extra, least, version, _) in EXTRAS.items():
        assert re.sub(r"\[.*\]", "", extras[extra][0]) == f"{name}>={least}"
        assert version == tested.get(name)


def test_all_is_here(tmp_path: Path, measured_machine: Machine) -> None:
    found = doctor(tmp_path / "not" / "there")
    assert found.problems == []
    assert found.exit_code == 0
    assert {library.name: library.version for library in found.libraries}["torch"] == torch.__version__
    there = found.hardware
    assert there is not None
    assert there.processor.threads == torch.get_num_threads()
    assert LEAST_BYTES < there.memory.free_bytes <= there.memory.total_bytes
    assert there.speed is not None
    assert there.speed.products == {dtype: measured_machine.products[dtype] for dtype in PRECISIONS}
    assert there.speed.eigen_seconds == pytest.approx(0.02 * (4096 / 400) ** 3)
    assert [room.path for room in found.disk if room.use == "results"] == [str(tmp_path / "not" / "there")]
    assert found.disk[0].free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_what_is_slow_has_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured_machine: Machine
) -> None:
    products = {"bfloat16": 2e10, "float32": 1e11, "float64": 1e11}
    slow = replace(measured_machine, products=products, written=5e7)
    monkeypatch.setattr(hardware, "this_machine", lambda device, output: slow)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    told = "\n".join(hardware.hardware(tmp_path).slow)
    for words in (
        "no card",
        "about 17 min for every billion",
        "3 threads where 8",
        "at 20% of the",
        "50 MB per second",
    ):
        assert words in told
    assert "take 33 min" in told  # 100 GB


def test_a_card(run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device: "Card of Cards",
        "mem_get_info": lambda device: (3_000_000_000, 8_000_000_000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(hardware.card, "problem", lambda device: "there is no triton")
    found = run_cli("doctor", tmp_path, "--json").json
    assert found["cards"] == [
        {
            "name": "Card of Cards",
            "memory_bytes": 8_000_000_000,
            "free_bytes": 3_000_000_000,
            "kernels_problem": "there is no triton",
        }
    ]
    assert found["speed"]["device"] == "cuda"
    assert "Compressed models on Card of Cards run in plain torch: there is no triton." in found["slow"]
    assert not any("no card" in said for said in found["slow"])
    assert "Card of Cards, 3.0 GB free of 8.0 GB, but there is no triton" in run_cli("doctor", tmp_path).stdout


def test_a_machine_that_may_not_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device, output: Path) -> Machine:
        raise OSError("MOETOOL_MEASURE=off is set")

    monkeypatch.setattr(hardware, "this_machine", refuse)
    found = doctor(tmp_path)
    assert found.to_json()["speed"] is None
    assert found.problems == []


def test_without_a_compiler(run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything works, but some of it slowly."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("MOETOOL_KERNELS", raising=False)
    compiler.problem.cache_clear()
    try:
        result = run_cli("doctor", tmp_path, "--json")
        shown = run_cli("doctor", tmp_path)
    finally:
        compiler.problem.cache_clear()
    assert result.code == shown.code == 0
    assert result.json["kernels"]["compiler"] is None
    assert "no C++ compiler" in result.json["kernels"]["problem"]
    assert any("plain torch" in said and "g++" in said for said in result.json["slow"])
    assert re.search(r"^kernels +none: there is no C\+\+ compiler", shown.stdout, re.M)


def test_a_missing_extra_is_no_problem(run_cli: Any, tmp_path: Path, versions: dict[str, str | None]) -> None:
    versions["matplotlib"] = None
    result = run_cli("doctor", tmp_path, "--json")
    assert result.code == 0
    extra = next(entry for entry in result.json["extras"] if entry["name"] == "matplotlib")
    assert extra["version"] is None
    assert "--plot" in extra["purpose"]
    assert extra["install"] == "pip install 'moetool[plots]'"
    assert re.search(r"matplotlib.*missing.*--plot.*moetool\[plots\]", run_cli("doctor", tmp_path).stdout)


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("scipy", None, "scipy is missing: pip install 'scipy>=1.14'."),
        ("torch", "2.9.1+cpu", "torch 2.9.1+cpu will not do: pip install 'torch>=2.11'."),
        ("transformers", "6.0.0rc1", "transformers 6.0.0rc1 will not do: pip install 'transformers>=5.17,<6'."),
    ],
)
def test_a_library_that_will_not_do(
    run_cli: Any, tmp_path: Path, versions: dict[str, str | None], name: str, version: str | None, words: str
) -> None:
    versions[name] = version
    result = run_cli("doctor", tmp_path, "--json")
    assert result.code == 3
    assert result.json["problems"] == [{"message": words, "exit_code": 3}]
    assert "processor" not in result.json  # nothing that may be broken was run


@pytest.mark.parametrize(("name", "version"), [("torch", "2.11"), ("rich", "14"), ("transformers", "5.99.1")])
def test_a_version_at_the_bounds_will_do(
    tmp_path: Path, versions: dict[str, str | None], name: str, version: str
) -> None:
    versions[name] = version
    assert doctor(tmp_path).problems == []


def test_a_library_that_cannot_be_imported(run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that fail with it nothing is said."""
    for name in ("peft", "xxhash"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run_cli("doctor", tmp_path)
    assert result.code == 3
    found = re.findall(r"^problem +(\S+) .*cannot be imported.*--force-reinstall\.$", result.stdout, re.M)
    assert found == ["peft"]
    assert result.stdout.endswith("not ok\n")


@pytest.mark.parametrize("use", ["results", "temporary files", "downloads"])
def test_too_little_disk(run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """Downloads need none where models are there already."""
    folders = {name: tmp_path / name for name in ("results", "temporary files", "downloads")}
    for folder in folders.values():
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folders["temporary files"]))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folders["downloads"] / "hub"))
    free = {folder: 999_000_000 if name == use else 10**12 for name, folder in folders.items()}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[path]))
    result = run_cli("doctor", folders["results"] / "new", "--json")
    problems = {room["use"]: room["problem"] for room in result.json["disk"]}
    assert problems.pop(use) == "999.0 MB are free there, and any job takes 1.0 GB"
    assert set(problems.values()) == {None}
    if use == "downloads":
        assert result.code == 0
    else:
        assert result.code == 4
        assert [problem["exit_code"] for problem in result.json["problems"]] == [4]
        assert str(folders[use]) in result.json["problems"][0]["message"]


def test_a_folder_that_may_not_be_written(run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    result = run_cli("doctor", tmp_path / "new", "--json")
    assert result.code == 4
    assert "may not be written" in result.json["problems"][0]["message"]


def test_too_little_memory_beside_a_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None]
) -> None:
    monkeypatch.setattr(hardware, "free_bytes", lambda: 900_000_000)
    found = doctor(tmp_path)
    assert [problem.exit_code for problem in found.problems] == [4]
    assert "900.0 MB of memory" in found.problems[0].message
    monkeypatch.setattr("tempfile.gettempdir", missing)
    versions["xxhash"] = None
    found = doctor(tmp_path)
    assert [problem.exit_code for problem in found.problems] == [3, 4]
    assert "TMPDIR" in found.problems[1].message
    assert found.exit_code == 3


def missing() -> str:
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")


@pytest.mark.parametrize("offline", [True, False])
def test_an_offline_hub(run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    assert doctor(tmp_path).offline is offline
    assert ("hub              offline" in run_cli("doctor", tmp_path).stdout) is offline
