"""What a wheel holds."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from moetool.cli.presets import directory, files

ROOT = Path(__file__).parents[1]


def test_presets_of_a_checkout_are_its_configs():
    assert directory() == ROOT / "configs"
    assert list(files()) == sorted((ROOT / "configs").glob("*.yaml"))


def test_a_wheel_has_the_presets_and_the_license(tmp_path):
    pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml asks for
    source = tmp_path / "source"
    for name in ("moetool", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(source / built.stdout.split()[-1]) as wheel:
        names = set(wheel.namelist())
        installed = tmp_path / "installed"
        wheel.extractall(installed)
    assert {name for name in names if name.startswith("moetool/presets/")} == {
        f"moetool/presets/{file.name}" for file in files()
    }
    assert "moetool/report/page.html" in names
    assert "moetool/calibration/text.xz" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"moetool"}
    # The installed package reads its own.
    code = "from moetool.cli.presets import directory, presets; print(directory(), len(presets()))"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=True
    )
    assert told.stdout.split()[0].endswith("moetool/presets")
    assert int(told.stdout.split()[1]) > 40
