"""A GGUF file that is begun, and gone on with."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moetool.export.gguf.file import GgufTensor, write_gguf
from moetool.format.gguf.words import gguf_library
from moetool.job.progress import Progress

UNITS = [
    [GgufTensor(f"blk.{layer}.{name}.weight", (4, 32), "f16", lambda: iter([torch.ones(4, 32)])) for name in names]
    for layer, names in enumerate((("attn_q", "attn_k"), ("ffn_up",), ("ffn_down",)))
]


class Steps(Progress):
    """Counts."""

    done = skipped = 0

    def advance(self) -> None:
        self.done += 1

    def skip(self, steps: int) -> None:
        self.skipped += steps


def write(file: Path, noted: list[str], note: Callable[[int, str], None]) -> Steps:
    progress = Steps()
    write_gguf(file, gguf_library().GGUFWriter(None, "llama"), UNITS, noted, progress, note)
    return progress


def test_what_was_noted_is_no_step_of_the_run_that_goes_on(tmp_path: Path) -> None:
    noted: list[str] = []

    def stop(number: int, digest: str) -> None:
        noted.append(digest)
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "model.gguf", noted, stop)
    rest = write(tmp_path / "model.gguf", noted, lambda number, digest: None)
    assert (rest.skipped, rest.done) == (3, 1)
    whole = write(tmp_path / "whole.gguf", [], lambda number, digest: None)
    assert (whole.skipped, whole.done) == (0, 4)
    assert (tmp_path / "model.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_what_was_noted_and_is_damaged_is_written_again(tmp_path: Path) -> None:
    again = write(tmp_path / "model.gguf", ["3:00"], lambda number, digest: None)
    assert (again.skipped, again.done) == (0, 4)
