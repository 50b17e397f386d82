"""Hidden states on disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moetool.calibration.activations import ActivationFile
from moetool.calibration.boundaries import TOKENS_PER_BATCH, batch_size
from moetool.checkpoint.files import fast_digest, is_intact
from moetool.errors import ResourceError

SHAPE = (5, 3, 4)


def rows(dtype: torch.dtype) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_written_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    file = ActivationFile(tmp_path / "a.bin", SHAPE, dtype)
    file.replace(iter(rows(dtype).split([2, 2, 1])))
    assert file.path.stat().st_size == file.nbytes == 60 * dtype.itemsize
    assert file.read(0, 5).equal(rows(dtype))
    assert file.read(1, 4).equal(rows(dtype)[1:4])
    assert file.read(2, 2).shape == (0, 3, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_batches_are_detached_and_converted(tmp_path: Path) -> None:
    file = ActivationFile(tmp_path / "a.bin", SHAPE, torch.bfloat16)
    file.replace(iter([rows(torch.float32).requires_grad_(True).transpose(1, 2).transpose(1, 2)]))
    assert file.read(0, 5).equal(rows(torch.bfloat16))


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path) -> None:
    file = ActivationFile(tmp_path / "a.bin", SHAPE, torch.float32)
    file.replace(iter([rows(torch.float32)]))

    def broken() -> Iterator[Tensor]:
        yield torch.zeros(SHAPE)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        file.replace(broken())
    assert file.read(0, 5).equal(rows(torch.float32))


def test_a_short_file_is_noticed(tmp_path: Path) -> None:
    file = ActivationFile(tmp_path / "a.bin", SHAPE, torch.float32)
    file.replace(iter([rows(torch.float32)[:4]]))
    assert file.read(0, 4).equal(rows(torch.float32)[:4])
    with pytest.raises(ResourceError, match="ended early"):
        file.read(3, 5)


def test_no_room(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = ActivationFile(tmp_path / "file" / "a.bin", SHAPE, torch.float32)
    with pytest.raises(ResourceError, match=r"Cannot write .*a\.bin.* It needs \d+ bytes, \d+ are free"):
        file.replace(iter([rows(torch.float32)]))


def test_the_digest_of_what_was_written(tmp_path: Path) -> None:
    file = ActivationFile(tmp_path / "a.bin", SHAPE, torch.bfloat16)
    digest = file.replace(iter(rows(torch.bfloat16).split(2)))
    assert digest == fast_digest(file.path)
    assert is_intact(file.path, digest)
    data = file.path.read_bytes()
    for damaged in (data[:-1], data + b"\0", bytes([data[0] ^ 1]) + data[1:]):
        file.path.write_bytes(damaged)
        assert not is_intact(file.path, digest)
    file.path.unlink()
    assert not is_intact(file.path, digest)


@pytest.mark.parametrize(
    ("windows", "length", "expected"),
    [
        (1, 16, 1),
        (3, 16, 3),
        (10**6, 16, TOKENS_PER_BATCH // 16),
        (10**6, TOKENS_PER_BATCH // 2, 2),
        (10**6, TOKENS_PER_BATCH // 2 + 1, 1),
        (10**6, TOKENS_PER_BATCH * 2, 1),
    ],
)
def test_batch_size(windows: int, length: int, expected: int) -> None:
    assert batch_size(windows, length) == expected
