"""Which hidden states wait on the disk."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled
from torch import Tensor

from moetool.calibration.activations import ActivationFile
from moetool.calibration.boundaries import boundaries_at_once, kept_dtype, stretch
from moetool.job import calibrated


@pytest.mark.parametrize(("layers", "files"), [(1, 3), (4, 5), (9, 7), (32, 12), (61, 16)])
def test_files_grow_with_the_root_of_the_depth(layers: int, files: int) -> None:
    assert boundaries_at_once(layers) == files


def test_models_in_16_bits_are_kept_in_16_bits() -> None:
    assert kept_dtype(torch.float16, torch.float32) == kept_dtype(torch.bfloat16, torch.bfloat16) == torch.bfloat16
    assert kept_dtype(torch.float32, torch.float32) == torch.float32


@pytest.mark.parametrize("between", sampled([1, 2, 3, 7], [2, 7]))
def test_what_is_computed_again_is_what_was_there(
    between: int,
    make_mixtral: Callable[..., Any],
    save_model: Callable[..., Path],
    run_cli: Callable[..., Any],
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However few boundaries are kept the result is the same, and no more files are there than were planned."""
    model = save_model(make_mixtral(dtype=torch.bfloat16, num_hidden_layers=7), tmp_path / "model")
    most, write = 0, ActivationFile.replace

    def counted(self: ActivationFile, batches: Iterator[Tensor]) -> str:
        nonlocal most
        digest = write(self, batches)
        most = max(most, len(list(self.path.parent.glob("*.bin"))))
        return digest

    monkeypatch.setattr(ActivationFile, "replace", counted)
    arguments = (
        "--calibration",
        tiny_text,
        "--mix",
        0,
        "--samples",
        4,
        "--sequence-length",
        16,
        "--gradient-samples",
        3,
    )
    assert run_cli("fisher-merge", model, tmp_path / "usual", *arguments).code == 0
    assert most <= boundaries_at_once(7)
    monkeypatch.setattr(calibrated, "stretch", lambda layers: between)
    assert run_cli("fisher-merge", model, tmp_path / "other", *arguments).code == 0
    for file in sorted((tmp_path / "usual").glob("base-*")):
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()
    assert stretch(7) == 3
