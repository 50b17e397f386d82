"""Presets: options that come along, in YAML files of the subject they are for."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml


def directory() -> Path:
    """Where the files lie: in the package, or in `configs/` of the checkout that the package is run from."""
    package = Path(__file__).parents[1]
    packaged = package / "presets"
    return packaged if packaged.is_dir() else package.parent / "configs"


@cache
def files() -> dict[Path, dict[str, Any]]:
    """The content of every file, in the order of their names."""
    return {file: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(directory().glob("*.yaml"))}


def presets() -> dict[str, str]:
    """Every preset by name, as the `FILE.yaml:NAME` that `--recipe` takes."""
    return {name: f"{file}:{name}" for file, content in files().items() for name in content.get("variants", {})}
