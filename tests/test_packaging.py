"""What a source distribution and a wheel hold, and that a wheel works where nothing else of the checkout is."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from moetool.cli.presets import directory, files
from moetool.version import __version__

ROOT = Path(__file__).parents[1]


def test_presets_of_a_checkout_are_its_configs():
    assert directory() == ROOT / "configs"
    assert list(files()) == sorted((ROOT / "configs").glob("*.yaml"))


def call(code: str, folder: Path, **environment: str) -> str:
    """What Python prints for a piece of code in a folder."""
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is in the wheel that is built of the source distribution of this checkout."""
    pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml asks for
    folder = tmp_path_factory.mktemp("packaging")
    for name in ("moetool", "configs"):
        shutil.copytree(ROOT / name, folder / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "checkout")
    build = "from setuptools import build_meta; print(build_meta.build_{}('..'))"
    source = call(build.format("sdist"), folder / "checkout").split()[-1]
    with tarfile.open(folder / source) as packed:
        packed.extractall(folder, filter="data")
    wheel = call(build.format("wheel"), folder / source.removesuffix(".tar.gz")).split()[-1]
    with zipfile.ZipFile(folder / wheel) as packed:
        packed.extractall(folder / "installed")
    return folder / "installed"


def test_a_wheel_has_every_file_of_the_package(installed: Path) -> None:
    own = {path.relative_to(ROOT) for path in (ROOT / "moetool").rglob("*") if path.is_file()}
    own = {path for path in own if "__pycache__" not in path.parts}
    presets = {Path("moetool", "presets", file.name) for file in files()}
    found = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    assert {path for path in found if not path.parts[0].endswith(".dist-info")} == own | presets
    assert list(installed.glob(f"moetool-{__version__}.dist-info/licenses/LICENSE"))


def test_a_wheel_works_without_a_checkout_and_a_compiler(installed: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    where = {"PYTHONPATH": str(installed), "PATH": str(tmp_path)}
    read = call(
        "from moetool.cli.presets import directory, presets; print(directory(), len(presets()))", tmp_path, **where
    )
    assert read.split()[0] == str(installed / "moetool" / "presets")
    assert int(read.split()[1]) > 40
    words = ["compress", str(tiny_mixtral), "made", "--method", "quantize", "--bits", "4"]
    call(f"import sys; from moetool.cli import main; sys.argv[1:] = {words}; main()", tmp_path, **where)
    assert (tmp_path / "made" / "config.json").exists()
