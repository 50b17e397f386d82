"""Tiny models, and the methods that leave them fewer experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest

from moetool.job.execute import run_stage
from moetool.job.result import Result
from moetool.stages import stages


@pytest.fixture(scope="session")
def model_of(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_of("mixtral", **config)`: a saved tiny model of a family, made once for the same arguments. Read-only."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = save_model(families.build(family, **overrides), tmp_path_factory.mktemp("models") / family)
        return made[key]

    return make


@pytest.fixture(scope="session")
def reduce(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """`reduce(source, "reap", experts=2)`: a method run on a model, once for the same arguments; the result lies at its
    `output`. Read-only."""
    made: dict[str, Result] = {}

    def run(source: Path, method: str, **options: Any) -> Result:
        key = repr((source, method, sorted(options.items())))
        if key not in made:
            kind = stages()[method]
            given = {"calibration": str(tiny_text), "mix": 0, "samples": 8, "sequence_length": 32, **options}
            made[key] = run_stage(kind, source, tmp_path_factory.mktemp(method) / "model", kind.options_type(**given))
        return made[key]

    return run
