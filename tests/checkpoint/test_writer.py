"""The writer against the safetensors library, byte for byte, and against everything that can go wrong on the way."""

import errno
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moetool.checkpoint import writer as writer_module
from moetool.checkpoint.header import DTYPES
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.writer import (
    ALIGNMENT,
    CheckpointWriter,
    InParts,
    TensorSpec,
    entry_nbytes,
    is_finite,
    shard_nbytes,
)
from moetool.errors import ResourceError, VerificationError

INDEX = "model.safetensors.index.json"


def specs(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def small() -> dict[str, Tensor]:
    return {"w": torch.arange(6.0).view(2, 3), "v": torch.arange(4).to(torch.bfloat16), "n": torch.arange(3)}


def every_dtype() -> dict[str, Tensor]:
    """Odd sizes, so that every tensor after the first would be misaligned in a naive order."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {"empty": torch.empty(0, 4, dtype=torch.bfloat16), "scalar": torch.tensor(2.5)}
    for code, dtype in DTYPES.items():
        # Bytes below 0x3c are finite numbers in every floating format here.
        raw = torch.randint(0, 0x3C, (5, 3 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        tensors[f"é/{code}"] = raw > 30 if dtype is torch.bool else raw.view(dtype)
    return tensors


def two_shards(directory: Path) -> CheckpointWriter:
    first, second = {"a": torch.ones(3)}, {"b": torch.zeros(2, 2)}
    writer = CheckpointWriter(directory, [specs(first), specs(second)])
    writer.write_shard(0, first.items())
    writer.write_shard(1, second.items())
    return writer


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_bytes_are_those_of_the_library_in_every_dtype(tmp_path: Path) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / "reference", {"format": "pt"})
    for order in (tensors, dict(reversed(tensors.items()))):
        writer = CheckpointWriter(tmp_path / "out", [specs(order)])
        assert writer.nbytes == shard_nbytes(specs(tensors)) == (tmp_path / "reference").stat().st_size
        file = writer.write_shard(0, iter(order.items()))
        writer.finish()
        assert file == tmp_path / "out" / "model.safetensors"
        assert file.read_bytes() == (tmp_path / "reference").read_bytes()
    with safe_open(file, "pt") as written:
        assert written.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            read = written.get_tensor(name)
            assert (read.dtype, read.shape, bits(read)) == (tensor.dtype, tensor.shape, bits(tensor))
    assert names(tmp_path / "out") == ["model.safetensors"]


def test_an_entry_is_what_the_header_grows_by() -> None:
    """To the byte, once for every place that offsets can have; padding apart."""
    specs = [TensorSpec(f"blocks.{i}.é", torch.bfloat16, (7 * 10**i, 3)) for i in range(8)]
    before = shard_nbytes(specs[:1])
    data = specs[0].nbytes
    for i, spec in enumerate(specs[1:], start=2):
        after = shard_nbytes(specs[:i])
        assert abs(after - before - spec.nbytes - entry_nbytes(spec, data)) < ALIGNMENT
        before, data = after, data + spec.nbytes


def test_header_is_padded_to_eight(tmp_path: Path) -> None:
    for length in range(1, 10):
        file = CheckpointWriter(tmp_path, [[TensorSpec("x" * length, torch.int8, (1,))]]).write_shard(
            0, [("x" * length, torch.zeros(1, dtype=torch.int8))]
        )
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
        assert file.stat().st_size % 8 == 1


def test_large_and_strided_tensors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "PIECE_BYTES", 100)
    base = torch.randn(7, 11, 13, generator=torch.Generator().manual_seed(1))
    tensors = {
        "plain": base,
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2, 1:],
        "column": base[:, 0, 0],
        "long rows": base.view(1, -1).expand(3, -1),
        "gradient": base.clone().requires_grad_(),
    }
    writer = CheckpointWriter(tmp_path, [specs(tensors)])
    writer.write_shard(0, tensors.items())
    with safe_open(tmp_path / "model.safetensors", "pt") as written:
        for name, tensor in tensors.items():
            assert torch.equal(written.get_tensor(name), tensor), name


def test_shards_index_and_reading_back(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    writer = two_shards(tmp_path / "out")
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert names(tmp_path / "out") == files
    writer.finish()
    assert names(tmp_path / "out") == [*files, INDEX]
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index == {"metadata": {"total_size": 28}, "weight_map": {"a": files[0], "b": files[1]}}
    assert writer.nbytes == sum((tmp_path / "out" / file).stat().st_size for file in files)
    (tmp_path / "out" / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.weight_bytes == writer.nbytes
    assert torch.equal(checkpoint.read("a"), torch.ones(3))


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        two_shards(tmp_path / name).finish()
    for file in names(tmp_path / "one"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_new_writer_goes_on_where_another_stopped(tmp_path: Path) -> None:
    plan = [specs({"a": torch.ones(3)}), specs({"b": torch.zeros(2, 2)})]
    writer = CheckpointWriter(tmp_path, plan)
    assert [writer.is_written(i) for i in range(2)] == [False, False]
    writer.write_shard(1, [("b", torch.zeros(2, 2))])
    with pytest.raises(VerificationError, match=r"1 of 2 shards .* the first model-00001-of-00002\.safetensors"):
        writer.finish()
    assert not (tmp_path / INDEX).exists()
    again = CheckpointWriter(tmp_path, plan)
    assert [again.is_written(i) for i in range(2)] == [False, True]
    os.truncate(again.file(1), again.file(1).stat().st_size - 1)
    assert not again.is_written(1)
    again.write_shard(0, [("a", torch.ones(3))])
    again.write_shard(1, [("b", torch.zeros(2, 2))])
    again.finish()
    assert (tmp_path / INDEX).exists()


def test_rewriting_a_shard_takes_the_index_away(tmp_path: Path) -> None:
    writer = two_shards(tmp_path)
    writer.finish()
    with pytest.raises(VerificationError):
        writer.write_shard(0, [])
    assert names(tmp_path) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_crash_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    def crashing() -> Iterator[tuple[str, Tensor]]:
        yield "w", small()["w"]
        assert names(tmp_path) == ["model.safetensors.tmp"]
        raise KeyboardInterrupt

    writer = CheckpointWriter(tmp_path, [specs(small())])
    with pytest.raises(KeyboardInterrupt):
        writer.write_shard(0, crashing())
    assert names(tmp_path) == []
    assert not writer.is_written(0)


def test_crash_keeps_the_file_that_was_there(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, [specs(small())])
    before = writer.write_shard(0, small().items()).read_bytes()
    with pytest.raises(VerificationError):
        writer.write_shard(0, [("w", torch.zeros(2, 3))])
    assert names(tmp_path) == ["model.safetensors"]
    assert writer.file(0).read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("w", torch.zeros(3, 2))], r"w is torch.float32 \[3, 2\]; planned was torch.float32 \[2, 3\]"),
        ([("w", torch.zeros(2, 3, dtype=torch.float64))], "w is torch.float64"),
        ([("x", torch.zeros(1))], "x came twice, or is not planned"),
        ([("w", torch.zeros(2, 3)), ("w", torch.zeros(2, 3))], "w came twice"),
        ([("w", torch.zeros(2, 3))], "lacks 2 of its 3 tensors, the first n"),
        ([], "lacks 3 of its 3"),
    ],
)
def test_what_differs_from_the_plan(tmp_path: Path, changes: list[tuple[str, Tensor]], message: str) -> None:
    writer = CheckpointWriter(tmp_path, [specs(small())])
    with pytest.raises(VerificationError, match=message):
        writer.write_shard(0, changes)
    assert names(tmp_path) == []


NONFINITE = [
    (dtype, value)
    for dtype in DTYPES.values()
    if dtype.is_floating_point or dtype.is_complex
    for value in (float("nan"), float("inf"), float("-inf"))
    # Some 8-bit formats have no infinities and take the largest number instead.
    if not torch.isfinite(torch.tensor([value]).to(dtype).to(torch.complex64)).all()
]


@pytest.mark.parametrize(("dtype", "value"), NONFINITE)
def test_nonfinite_values(tmp_path: Path, dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "PIECE_BYTES", 64)
    bad = torch.ones(40, dtype=torch.float64)
    bad[33] = value
    tensor = bad.to(dtype)
    plan = [[TensorSpec("fine", torch.float32, (2,)), TensorSpec("bad", dtype, (40,))]]
    content = [("fine", torch.zeros(2)), ("bad", tensor)]
    with pytest.raises(VerificationError, match="Tensor bad holds NaN or infinity"):
        CheckpointWriter(tmp_path, plan).write_shard(0, content)
    assert names(tmp_path) == []


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_finite_values_pass(dtype: torch.dtype) -> None:
    assert is_finite(torch.tensor([0.5, 2.0]).to(dtype))
    assert is_finite(torch.empty(0, dtype=dtype))
    if dtype.is_floating_point and dtype.itemsize > 1:
        assert is_finite(torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype))


def test_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    import weakref

    alive: list[weakref.ref[Tensor]] = []

    def lazily() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            assert [ref() for ref in alive] == [None] * len(alive)
            tensor = torch.ones(5)
            alive.append(weakref.ref(tensor))
            pair = (name, tensor)
            del tensor
            yield pair
            del pair

    writer = CheckpointWriter(tmp_path, [[TensorSpec(name, torch.float32, (5,)) for name in "abc"]])
    writer.write_shard(0, lazily())
    assert len(alive) == 3


def test_full_disk_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    writer = CheckpointWriter(tmp_path, [specs(small())])
    with pytest.raises(ResourceError, match=f"needs {writer.nbytes} bytes, 100 are free"):
        writer.write_shard(0, small().items())
    assert names(tmp_path) == []


def test_full_disk_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    real = os.pwrite

    def pwrite(descriptor: int, data: Any, position: int) -> int:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(position)
        return real(descriptor, data[:10], position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    writer = CheckpointWriter(tmp_path, [specs(small())])
    with pytest.raises(ResourceError, match=rf"No space left on device\. It needs {writer.nbytes} bytes, \d+ are free"):
        writer.write_shard(0, small().items())
    assert written == [0]
    assert names(tmp_path) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, position: real(descriptor, data[:7], position))
    file = CheckpointWriter(tmp_path / "out", [specs(small())]).write_shard(0, small().items())
    save_file(small(), tmp_path / "reference", {"format": "pt"})
    assert file.read_bytes() == (tmp_path / "reference").read_bytes()


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="Cannot write"):
        CheckpointWriter(tmp_path / "file" / "out", [specs(small())]).write_shard(0, small().items())


def test_errors_of_the_source_are_not_taken_for_errors_of_the_disk(tmp_path: Path) -> None:
    def unreadable() -> Iterator[tuple[str, Tensor]]:
        raise OSError(errno.EIO, "Input/output error")
        yield

    with pytest.raises(OSError, match="Input/output") as caught:
        CheckpointWriter(tmp_path, [specs(small())]).write_shard(0, unreadable())
    assert not isinstance(caught.value, ResourceError)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([], "at least one tensor"),
        ([[]], "at least one tensor"),
        ([[TensorSpec("a", torch.int8, ())], [TensorSpec("a", torch.int8, ())]], "a twice"),
        ([[TensorSpec("__metadata__", torch.int8, ())]], "reserves"),
        ([[TensorSpec("a", torch.complex128, ())]], "torch.complex128, which safetensors cannot store"),
    ],
)
def test_plans_that_cannot_be_written(tmp_path: Path, plan: list[list[TensorSpec]], message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        CheckpointWriter(tmp_path, plan)


@pytest.mark.parametrize("stray", ["model.safetensors", "model-00001-of-00003.safetensors"])
def test_weights_of_another_run_are_in_the_way(tmp_path: Path, stray: str) -> None:
    writer = two_shards(tmp_path)
    (tmp_path / stray).write_text("")
    with pytest.raises(VerificationError, match=stray):
        writer.finish()
    assert not (tmp_path / INDEX).exists()


def test_stale_index_beside_a_single_file(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, [specs(small())])
    writer.write_shard(0, small().items())
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(VerificationError, match="index"):
        writer.finish()


def parts_of(tensor: Tensor, *cuts: int) -> InParts:
    """A tensor as parts of other shapes than its own rows."""
    bounds = [0, *cuts, tensor.numel()]
    pieces = (tensor.flatten()[start:stop] for start, stop in pairwise(bounds))
    return InParts(tensor.dtype, tuple(tensor.shape), pieces)


@pytest.mark.parametrize("cuts", [(), (1,), (2, 2, 5), (0, 6)])
def test_a_tensor_in_parts_gives_the_same_bytes(
    tmp_path: Path, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "PIECE_BYTES", 8)
    save_file(small(), tmp_path / "reference", {"format": "pt"})
    tensors = {**small(), "w": parts_of(small()["w"], *cuts)}
    file = CheckpointWriter(tmp_path / "out", [specs(small())]).write_shard(0, tensors.items())
    assert file.read_bytes() == (tmp_path / "reference").read_bytes()


def test_parts_may_have_any_shape_and_be_strided(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    parts = [whole[0], whole[1:3].T.contiguous().T, whole[3:]]
    writer = CheckpointWriter(tmp_path, [specs({"w": whole})])
    writer.write_shard(0, [("w", InParts(torch.float32, (4, 6), parts))])
    with safe_open(tmp_path / "model.safetensors", "pt") as written:
        assert written.get_tensor("w").equal(whole)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([torch.zeros(5)], r"w came in parts of 20 bytes, not 24; model\.safetensors was not written"),
        ([torch.zeros(2, 3), torch.zeros(1)], "w came in parts of 28 bytes, not 24"),
        ([torch.zeros(9)], "w came in parts of 36 bytes, not 24"),
        ([torch.zeros(2, 3, dtype=torch.float64)], "w came in parts of 48 bytes, not 24"),
        ([torch.zeros(3), torch.tensor([0.0, torch.nan, 0.0])], "Tensor w holds NaN or infinity"),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_parts_that_are_not_the_whole_leave_no_file(
    tmp_path: Path, parts: list[Tensor], message: str, position: int
) -> None:
    """Also where the bytes too many could pass for the next tensor's, or what is missing comes last."""
    others = [(name, tensor) for name, tensor in small().items() if name != "w"]
    others.insert(position, ("w", InParts(torch.float32, (2, 3), parts)))
    with pytest.raises(VerificationError, match=message):
        CheckpointWriter(tmp_path, [specs(small())]).write_shard(0, others)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        (torch.float64, (2, 3), r"w is torch.float64 \[2, 3\]; planned was torch.float32 \[2, 3\]"),
        (torch.float32, (3, 2), r"w is torch.float32 \[3, 2\]; planned"),
    ],
)
def test_parts_of_another_plan(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], message: str) -> None:
    def untouched() -> Iterator[Tensor]:
        raise AssertionError("no part is made of a tensor that is not planned")
        yield

    with pytest.raises(VerificationError, match=message):
        CheckpointWriter(tmp_path, [specs(small())]).write_shard(0, [("w", InParts(dtype, shape, untouched()))])
    assert names(tmp_path) == []


def test_one_part_in_memory_at_a_time(tmp_path: Path) -> None:
    import weakref

    alive: list[weakref.ref[Tensor]] = []

    def lazily() -> Iterator[Tensor]:
        for _ in range(3):
            part = torch.ones(5)
            alive.append(weakref.ref(part))
            yield part
            del part
            assert sum(ref() is not None for ref in alive) <= 1

    writer = CheckpointWriter(tmp_path, [[TensorSpec("a", torch.float32, (3, 5))]])
    writer.write_shard(0, [("a", InParts(torch.float32, (3, 5), lazily()))])
    assert len(alive) == 3
