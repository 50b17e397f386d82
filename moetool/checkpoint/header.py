"""A safetensors file: eight bytes of length, a JSON object, then the data that it describes."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from moetool.errors import InvalidInputError

# In the order in which the safetensors library lays tensors out: large items first, so that every tensor starts
# aligned, whatever the sizes of those before it.
DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies on disk: file and bytes, with its dtype and shape.

    Attributes:
        name: its name in the checkpoint.
        dtype: element type, as stored.
        shape: sizes of the dimensions; empty for a scalar.
        nbytes: bytes of data.
        file: the safetensors file that holds it.
        offset: first byte of its data, counted from the start of the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int


@dataclass(frozen=True)
class Header:
    """A validated header.

    Attributes:
        raw: the JSON as it stands in the file, without the length before it.
        file_bytes: size of the whole file.
        written: when the file was written last, in nanoseconds since 1970.
        tensors: every tensor of the file, by name.
        format: the library that the file says it was written for, such as `pt` or `mlx`; empty if it says none.
    """

    raw: bytes
    file_bytes: int
    written: int
    tensors: dict[str, TensorInfo]
    format: str


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what the system says of a file that cannot be read, or is no text, into an `InvalidInputError`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{file} is not UTF-8. {_read_instead(file, error)}") from error
    except OSError as error:
        raise InvalidInputError(f"Cannot read {file}: {error.strerror or error}.") from error


def _read_instead(file: Path, error: UnicodeDecodeError) -> str:
    """What a file may be that is no UTF-8, by its first bytes, and what to do."""
    with file.open("rb") as handle:
        first = handle.read(6)
    if first.startswith((b"\x1f\x8b", b"PK\3\4", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        return "It is packed: unpack it."
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "It begins as UTF-16 does: iconv -f utf-16 -t utf-8 OLD > NEW."
    return f"It holds byte {error.object[error.start]:#04x} where none can be. Convert it, for example with iconv."


def read_header(file: Path) -> Header:
    """Read and validate the header of one file; its data is not touched.

    Raises:
        InvalidInputError: the file cannot be read, is truncated, or its header contradicts itself or the file's size.
    """
    with reading(file):
        stat = file.stat()
        file_bytes = stat.st_size
        with file.open("rb") as handle:
            start = handle.read(LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if len(start) < LENGTH_BYTES:
                _refuse(file, f"it has {file_bytes} bytes, too few for a safetensors file")
            if start == b"version ":
                _refuse(file, "it is a Git LFS pointer, not the weights. Run `git lfs pull` where it was cloned", "")
            if length > MAX_HEADER_BYTES:
                _refuse(file, f"it claims a header of {length} bytes, more than {MAX_HEADER_BYTES}")
            if LENGTH_BYTES + length > file_bytes:
                _refuse(file, f"expected at least {LENGTH_BYTES + length} bytes, found {file_bytes}: it is truncated")
            raw = handle.read(length)
    tensors, data_bytes, written_for = _parse(file, raw)
    expected = LENGTH_BYTES + length + data_bytes
    if file_bytes < expected:
        _refuse(file, f"expected {expected} bytes, found {file_bytes}: it is truncated")
    if file_bytes > expected:
        _refuse(file, f"expected {expected} bytes, found {file_bytes}: something follows the last tensor")
    return Header(raw, file_bytes, stat.st_mtime_ns, tensors, written_for)


def _parse(file: Path, raw: bytes) -> tuple[dict[str, TensorInfo], int, str]:
    """The tensors of a header, the bytes of data they take together, and the library it says it was written for."""
    try:
        entries = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _refuse(file, f"its header is not valid JSON ({error})")
    if not isinstance(entries, dict):
        _refuse(file, "its header is not a JSON object")
    said = entries.pop("__metadata__", None)
    data_start = LENGTH_BYTES + len(raw)
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        try:
            code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            _refuse(file, f"the entry of tensor {name!r} lacks dtype, shape or data_offsets")
        if not isinstance(code, str) or code not in DTYPES:
            known = ", ".join(DTYPES)
            _refuse(file, f"tensor {name!r} has the unknown dtype {code!r} (known: {known})", "")
        if not isinstance(shape, list) or not all(_is_size(number) for number in (*shape, begin, end)):
            _refuse(file, f"the shape or offsets of tensor {name!r} are not natural numbers")
        nbytes = math.prod(shape) * DTYPES[code].itemsize
        if end - begin != nbytes:
            _refuse(file, f"tensor {name!r} ({code} {shape}) needs {nbytes} bytes; its offsets span {end - begin}")
        tensors[name] = TensorInfo(name, DTYPES[code], tuple(shape), nbytes, file, data_start + begin)
    position = data_start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            kind = "overlaps the tensor before it" if info.offset < position else "leaves a gap before it"
            _refuse(file, f"tensor {info.name!r} at byte {info.offset} {kind} (expected byte {position})")
        position += info.nbytes
    return tensors, position - data_start, str(said.get("format", "")) if isinstance(said, dict) else ""


def check_dtype(name: str, dtype: torch.dtype, path: Path) -> None:
    """Raise `InvalidInputError` if a tensor of weights is not stored in floating point numbers of 16 bits or more: its
    numbers are codes, whose scales nothing tells of."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise InvalidInputError(
            f"{path}: {name} is stored as {str(dtype).removeprefix('torch.')}, and config.json names no quantization "
            "that says what its numbers stand for. Take config.json as it was published with these files, or the "
            "weights in 16 or 32 bits."
        )


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, in place."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def read_numbers(info: TensorInfo, first: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor's numbers from the `first` on, in a shape.

    Not mapped but read: pages of a mapping stay in this process's memory long after the tensor is forgotten.
    """
    target = torch.empty(shape, dtype=info.dtype)
    buffer = byte_view(target)
    with reading(info.file), info.file.open("rb", buffering=0) as file:
        file.seek(info.offset + first * info.dtype.itemsize)
        while buffer:
            if not (count := file.readinto(buffer)):
                raise InvalidInputError(f"{info.file} ends inside tensor {info.name}: it changed since it was opened.")
            buffer = buffer[count:]
    return target


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r}")
    return unique


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _refuse(file: Path, what: str, advice: str = "Download or write it again") -> NoReturn:
    raise InvalidInputError(f"Cannot use {file}: {what}." + (f" {advice}." if advice else ""))
