"""Everything in a checkpoint that is not a weight: copied, patched, written whole or not at all."""

import contextlib
import copy
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import xxhash
from safetensors.torch import save_file
from torch import Tensor

from moetool.checkpoint.header import reading
from moetool.checkpoint.permissions import open_to_readers
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import ResourceError, UsageError, full_disk

TEMPORARY = ".tmp"


@contextmanager
def atomically(file: Path, needed: int | None = None) -> Iterator[Path]:
    """A temporary name to write `file` of `needed` bytes under: synced and renamed at the end, removed on an exception.

    Raises:
        ResourceError: the directory, the sync or the rename fails.
    """
    temporary = file.with_name(file.name + TEMPORARY)
    try:
        with storage_errors(file, needed):
            file.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        settle(temporary, file, needed)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # gone already if all went well


def settle(temporary: Path, file: Path, needed: int | None) -> None:
    """Give a finished file its name, once it is on the disk. Raises `ResourceError` where sync or rename fails."""
    with storage_errors(file, needed):
        sync(temporary)
        temporary.replace(file)
        sync(file.parent)


@contextmanager
def storage_errors(file: Path, needed: int | None = None) -> Iterator[None]:
    """Turn an `OSError` while writing `file`, which takes `needed` bytes, into a `ResourceError` with the numbers; so,
    too, what libraries make of a full disk."""
    try:
        yield
    except OSError as error:
        numbers = "" if needed is None else f" It needs {needed} bytes, {free_bytes(file)} are free."
        raise ResourceError(f"Cannot write {file}: {error.strerror or error}.{numbers}") from error
    except Exception as error:
        if (problem := storage_problem(error, file, needed)) is None:
            raise
        raise problem from error


def storage_problem(error: BaseException, place: Path, needed: int | None = None) -> ResourceError | None:
    """An error with the free bytes at `place`, if a library failed because the disk or quota is full; else `None`."""
    if (reason := full_disk(error)) is None:
        return None
    numbers = f"{free_bytes(place)} bytes are free"
    if needed is not None:
        numbers = f"it needs {needed} bytes, {numbers}"
    return ResourceError(f"Cannot write to {place}: {reason} ({numbers}). Free some, then go on with --resume.")


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file that is not a model's, whole or not at all, with the permissions of any other new file."""
    needed = sum(tensor.nbytes for tensor in tensors.values())
    with atomically(file, needed) as temporary, storage_errors(file, needed):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        open_to_readers(temporary)


def place(file: Path, target: Path) -> Path:
    """Give a file a second name in the same file system, without a copy where that can do so; returns that name.

    Raises:
        ResourceError: neither works.
    """
    size = file.stat().st_size
    with atomically(target, size) as temporary, storage_errors(target, size):
        temporary.unlink(missing_ok=True)
        try:
            os.link(file, temporary)
        except OSError:
            shutil.copyfile(file, temporary)
    return target


def free_bytes(path: Path) -> int:
    """Bytes this user may still write where `path` is, or will be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def json_bytes(content: Mapping[str, object]) -> bytes:
    """Serialize JSON to the very bytes that `write_json` writes."""
    # The default of `json`, pure ASCII, and not UTF-8: it can write every string that it can read.
    return (json.dumps(content, indent=2) + "\n").encode("ascii")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write an object as indented JSON with its keys in the order given, whole or not at all.

    Raises:
        ResourceError: the file cannot be written.
    """
    write_bytes(path, json_bytes(content))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file, whole or not at all. Raises `ResourceError` where it cannot be written."""
    with atomically(path, len(content)) as temporary, storage_errors(path, len(content)):
        temporary.write_bytes(content)


def patch_config(
    config: Mapping[str, object], changes: Mapping[str, object] = MappingProxyType({}), *, remove: Collection[str] = ()
) -> dict[str, object]:
    """A copy of a config with `changes` in the place of its own values, or at the end, and without `remove`.

    A round trip through a library's config class would add its defaults and drop what it does not know.
    """
    patched = {key: value for key, value in {**config, **changes}.items() if key not in remove}
    return copy.deepcopy(patched)


def copy_sidecars(checkpoint: Checkpoint, directory: Path) -> list[Path]:
    """Copy `checkpoint.sidecars()` byte for byte into `directory`, in the same subdirectories; returns the copies.

    Raises:
        UsageError: `directory` is the checkpoint's own, or inside it.
        InvalidInputError: a file cannot be read.
        ResourceError: a file cannot be written.
    """
    if directory.resolve().is_relative_to(checkpoint.path.resolve()):
        raise UsageError(f"The output {directory} lies inside the input {checkpoint.path}: choose another place.")
    copies = []
    for file in checkpoint.sidecars():
        copies.append(copy_file(file, directory / file.relative_to(checkpoint.path)))
    return copies


def copy_file(file: Path, target: Path) -> Path:
    """Copy a file byte for byte, whole or not at all; returns `target`.

    Raises:
        InvalidInputError: it cannot be read.
        ResourceError: it cannot be written.
    """
    with reading(file):
        source = file.open("rb")
    with source:
        size = os.fstat(source.fileno()).st_size
        with atomically(target, size) as temporary, storage_errors(target, size), temporary.open("wb") as copied:
            shutil.copyfileobj(source, copied, 1 << 20)
    return target


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal, read in blocks."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


class FastDigest:
    """XXH3 and the length of what was given to it: finds damage, not malice, many times faster than a disk reads."""

    def __init__(self) -> None:
        self._hash, self._nbytes = xxhash.xxh3_128(), 0

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes to those that the digest is computed from."""
        self._hash.update(data)
        self._nbytes += len(data)

    def __str__(self) -> str:
        return f"{self._nbytes}:{self._hash.hexdigest()}"


def fast_digest(path: Path) -> str:
    """Compute the `FastDigest` of a file, which is read in blocks of 4 MiB."""
    digest = FastDigest()
    with path.open("rb", buffering=0) as handle:
        block = bytearray(min(4 << 20, os.fstat(handle.fileno()).st_size + 1))
        while count := handle.readinto(block):
            digest.update(memoryview(block)[:count])
    return str(digest)


def is_intact(path: Path, digest: str) -> bool:
    """Whether a file is there and has a `FastDigest`; one of another size is not read."""
    try:
        return path.stat().st_size == int(digest.partition(":")[0]) and fast_digest(path) == digest
    except OSError:
        return False


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
