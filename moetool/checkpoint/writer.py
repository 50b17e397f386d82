"""Weight files, written one planned shard at a time, each whole or not at all."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moetool.checkpoint.files import atomically, free_bytes, storage_errors, write_json
from moetool.checkpoint.header import DTYPE_CODES, LENGTH_BYTES, MAX_HEADER_BYTES, byte_view
from moetool.checkpoint.names import INDEX, SINGLE
from moetool.errors import InvalidInputError, ResourceError, VerificationError

PIECE_BYTES = 8 << 20  # what is checked and written at once: in the cache, and small beside any tensor that matters
ALIGNMENT = 8
_ORDER = {dtype: position for position, dtype in enumerate(DTYPE_CODES)}


class NotFiniteError(VerificationError):
    """A tensor that was to be written holds NaN or infinity.

    Attributes:
        tensor: its name.
    """

    def __init__(self, tensor: str, file: Path) -> None:
        what = f"Tensor {tensor} holds NaN or infinity; {file} was not written."
        super().__init__(f"{what} Look at the step that computed it.")
        self.tensor = tensor


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's numbers in the file, without its header entry."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class InParts:
    """A tensor that is never in memory as a whole: consecutive parts in row-major order, each made when asked for.

    Attributes:
        dtype, shape: of the whole.
        parts: tensors of that dtype whose elements, one after the other, are those of the whole.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Iterable[Tensor]


@dataclass(frozen=True)
class _Layout:
    """A shard's first bytes, up to the data, and where in the file each tensor starts."""

    header: bytes
    offsets: dict[str, int]
    nbytes: int


def shard_nbytes(specs: Sequence[TensorSpec]) -> int:
    """Exact size in bytes of the file that holds these tensors, header and padding included."""
    return _lay_out(specs).nbytes


def entry_nbytes(spec: TensorSpec, start: int) -> int:
    """Bytes that one more tensor takes in a file's header, if its data start `start` bytes after it."""
    return len(_text({spec.name: _entry(spec, start)})) - 1  # two braces less, and a comma


class CheckpointWriter:
    """Writes the weight files of a checkpoint as planned; the index comes last, in `finish`.

    Until then nothing can load what is there, and every shard that has its final name is complete, so an interrupted
    run goes on with those that `is_written` denies. The same tensors always give the same bytes: those that
    `safetensors.torch.save_file` would write.

    Args:
        directory: where to write; made when the first shard is written.
        shards: the tensors of every file, in any order.

    Raises:
        VerificationError: the plan is empty, names a tensor twice, or has a dtype that safetensors cannot store.
    """

    def __init__(self, directory: Path, shards: Sequence[Sequence[TensorSpec]]) -> None:
        _check_plan(shards)
        self.directory = Path(directory)
        self.shards = tuple(tuple(specs) for specs in shards)
        self._sizes = tuple(shard_nbytes(specs) for specs in self.shards)

    @property
    def nbytes(self) -> int:
        """Exact bytes of all weight files together; the index is not among them."""
        return sum(self._sizes)

    def file(self, i: int) -> Path:
        """The path of shard `i`, under which it stands once it is complete."""
        count = len(self.shards)
        return self.directory / (SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors")

    def is_written(self, i: int) -> bool:
        """Whether shard `i` is there in its planned size; what it holds is not looked at."""
        file = self.file(i)
        return file.is_file() and file.stat().st_size == self._sizes[i]

    def write_shard(self, i: int, tensors: Iterable[tuple[str, Tensor | InParts]]) -> Path:
        """Write shard `i` from its tensors, in any order, on any device; returns its path.

        Each tensor is written and forgotten before the next is asked for, so a generator that makes them one by one
        holds one at a time. A file of that name is replaced; on any exception it stays as it was.

        Raises:
            VerificationError: a tensor is not in the plan, comes twice, is missing, differs from its planned dtype or
                shape, or holds NaN or infinity.
            ResourceError: the disk is full, or the file cannot be written.
        """
        file, needed = self.file(i), self._sizes[i]
        layout = _lay_out(self.shards[i])
        due = {spec.name: spec for spec in self.shards[i]}
        with storage_errors(file, needed):
            # A checkpoint with a shard being replaced is not a complete one.
            (self.directory / INDEX).unlink(missing_ok=True)
        with atomically(file, needed) as temporary:
            with storage_errors(file, needed):
                temporary.unlink(missing_ok=True)
                if (free := free_bytes(file)) < needed:
                    raise ResourceError(f"Cannot write {file}: it needs {needed} bytes, {free} are free. Free some.")
                handle = temporary.open("wb", buffering=0)
            with handle:
                with storage_errors(file, needed):
                    _write(handle.fileno(), layout.header, 0)
                for name, tensor in tensors:
                    due_bytes = _check_planned(file, due.pop(name, None), name, tensor)
                    position = layout.offsets[name]
                    end = position + due_bytes
                    for piece in _pieces(tensor):
                        if not is_finite(piece):
                            raise NotFiniteError(name, file)
                        with storage_errors(file, needed):
                            position = _write(handle.fileno(), byte_view(piece), position)
                    del tensor, piece  # before the caller makes the next one
                    if position != end:
                        raise VerificationError(
                            f"Tensor {name} came in parts of {position - end + due_bytes} bytes, not {due_bytes}; "
                            f"{file.name} was not written."
                        )
                if due:
                    raise VerificationError(
                        f"{file} lacks {len(due)} of its {len(self.shards[i])} tensors, the first {min(due)}; "
                        "it was not written."
                    )
        return file

    def finish(self) -> None:
        """Check that every shard is there, and nothing that would be loaded in their place; then write the index.

        Raises:
            VerificationError: a shard is missing or has another size, or weight files of another run are in the way.
            ResourceError: the index cannot be written.
        """
        files = [self.file(i) for i in range(len(self.shards))]
        if missing := [file.name for i, file in enumerate(files) if not self.is_written(i)]:
            raise VerificationError(
                f"{len(missing)} of {len(files)} shards in {self.directory} are missing or incomplete, "
                f"the first {missing[0]}. Run again with --resume."
            )
        present = {*self.directory.glob("model*.safetensors"), *self.directory.glob(INDEX)}
        own = {*files, self.directory / INDEX} if len(files) > 1 else set(files)
        if strays := sorted(file.name for file in present - own):
            raise VerificationError(
                f"{self.directory} also holds {', '.join(strays[:5])}, from another run. Remove or use --overwrite."
            )
        if (index := self.index()) is not None:
            write_json(self.directory / INDEX, index)

    def index(self) -> dict[str, object] | None:
        """Content of the index file; `None` for a single shard, which needs none."""
        if len(self.shards) == 1:
            return None
        located = {spec.name: self.file(i).name for i, specs in enumerate(self.shards) for spec in specs}
        total = sum(spec.nbytes for specs in self.shards for spec in specs)
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(located.items()))}


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. Integers and booleans always are."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # torch has no comparisons for 8-bit floats
    # NaN survives min and max. One pass and no temporary: tens of times faster than `isfinite(...).all()`.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def damaged(name: str, folder: Path) -> InvalidInputError:
    """Return the error that a tensor in a checkpoint's files has numbers that are not finite."""
    return InvalidInputError(f"Tensor {name} of {folder} has NaN or infinite values: the checkpoint is damaged.")


def check_finite(name: str, part: Tensor) -> None:
    """Raise `InvalidInputError` for a part of a tensor with NaN or infinity."""
    if not is_finite(part):
        raise InvalidInputError(f"{name} would hold NaN or infinity: the checkpoint is damaged.")


def _check_plan(shards: Sequence[Sequence[TensorSpec]]) -> None:
    if not shards or not all(shards):
        raise VerificationError("A checkpoint needs at least one tensor in every shard.")
    seen: set[str] = set()
    for spec in (spec for specs in shards for spec in specs):
        if spec.dtype not in DTYPE_CODES:
            raise VerificationError(f"Tensor {spec.name} is {spec.dtype}, which safetensors cannot store.")
        if spec.name in seen or spec.name == "__metadata__":
            raise VerificationError(f"The plan has the name {spec.name} twice, or safetensors reserves it.")
        seen.add(spec.name)


def _check_planned(file: Path, spec: TensorSpec | None, name: str, tensor: Tensor | InParts) -> int:
    """The bytes that are planned for a tensor. Raises `VerificationError` unless it is the one that is planned."""
    if spec is None:
        raise VerificationError(f"Tensor {name} came twice, or is not planned for {file.name}; it was not written.")
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        raise VerificationError(
            f"Tensor {name} is {tensor.dtype} {list(tensor.shape)}; planned was {spec.dtype} {list(spec.shape)}. "
            f"{file.name} was not written."
        )
    return spec.nbytes


def _lay_out(specs: Sequence[TensorSpec]) -> _Layout:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position, starts = 0, {}
    for spec in sorted(specs, key=lambda spec: (_ORDER[spec.dtype], spec.name)):
        starts[spec.name] = position
        entries[spec.name] = _entry(spec, position)
        position += spec.nbytes
    text = _text(entries)
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise VerificationError(f"{len(specs)} tensors in one shard need {len(text)} bytes of header: split it.")
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return _Layout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + position)


def _entry(spec: TensorSpec, start: int) -> dict[str, object]:
    """What the header says of a tensor whose data start `start` bytes after it."""
    offsets = [start, start + spec.nbytes]
    return {"dtype": DTYPE_CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}


def _text(entries: dict[str, object]) -> bytes:
    return json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()


def _pieces(tensor: Tensor | InParts) -> Iterator[Tensor]:
    """The tensor in row-major order on the CPU, in contiguous parts so small that a copy of one does not matter."""
    if isinstance(tensor, InParts):
        for part in tensor.parts:
            yield from _pieces(part)
        return
    tensor = tensor.detach()
    if tensor.nbytes <= PIECE_BYTES:
        yield tensor.cpu().contiguous()
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    rows = max(1, PIECE_BYTES * tensor.shape[0] // tensor.nbytes)
    for start in range(0, tensor.shape[0], rows):
        yield from _pieces(tensor[start : start + rows] if rows > 1 else tensor[start])


def _write(descriptor: int, data: bytes | memoryview, position: int) -> int:
    """Write all of `data` at `position`; returns the position after it."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, position)
        rest, position = rest[count:], position + count
    return position
