"""`moetool compare`, killed."""

import signal
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CrashDriver, contents
from sampling import sampled


@pytest.mark.parametrize("share", sampled((0.3, 0.5), [0.3]))
@pytest.mark.exhaustive
def test_killed_anywhere_it_ends_with_the_same_models(
    crash: CrashDriver, calibration: Any, tiny_mixtral_bf16: Path, tiny_text: Path, tmp_path: Path, share: float
) -> None:
    """In the statistics pass that two rows share, or later."""
    rows = ("--methods", "hybrid", "--ratios", "0.6,0.4", "--option", "hybrid:group_size=16")
    options = (*rows, *calibration, "--samples", 4)
    arguments = ("compare", "--work", tiny_mixtral_bf16, *options, "--data", tiny_text, "--windows", 2, "--keep")

    def made(work: Path) -> dict[str, Any]:
        return {path.name: contents(path) for path in work.iterdir() if path.is_dir()}

    whole = crash(tmp_path / "whole", arguments)
    assert whole["code"] == 0
    assert len(made(tmp_path / "whole")) == 2
    work = tmp_path / "work"
    assert crash(work, arguments, at=int(share * whole["changes"]))["code"] == -signal.SIGKILL
    assert crash(work, arguments)["code"] == 0
    assert made(work) == made(tmp_path / "whole")
