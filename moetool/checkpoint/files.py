"""Everything in a checkpoint that is not a weight: copied, patched, written whole or not at all."""

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, ResourceError, UsageError

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
        with storage_errors(file, needed):
            _sync(temporary)
            temporary.replace(file)
            _sync(file.parent)
    finally:
        temporary.unlink(missing_ok=True)  # gone already if all went well


@contextmanager
def storage_errors(file: Path, needed: int | None = None) -> Iterator[None]:
    """Turn an `OSError` while writing `file`, which takes `needed` bytes, into a `ResourceError` with the numbers."""
    try:
        yield
    except OSError as error:
        numbers = "" if needed is None else f" It needs {needed} bytes, {free_bytes(file)} are free."
        raise ResourceError(f"Cannot write {file}: {error.strerror or error}.{numbers}") from error


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file that is not a model's, whole or not at all, with the permissions of any other new file."""
    with atomically(file) as temporary, storage_errors(file):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)


def free_bytes(path: Path) -> int:
    """Bytes this user may still write where `path` is, or will be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as indented JSON with its keys in the order given, whole or not at all.

    Raises:
        ResourceError: the file cannot be written.
    """
    # The default of `json`, pure ASCII, and not UTF-8: it can write every string that it can read.
    encoded = (json.dumps(content, indent=2) + "\n").encode("ascii")
    with atomically(path, len(encoded)) as temporary, storage_errors(path, len(encoded)):
        temporary.write_bytes(encoded)


def patch_config(config: Mapping[str, Any], /, *, remove: Collection[str] = (), **changes: Any) -> dict[str, Any]:
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
        target = directory / file.relative_to(checkpoint.path)
        try:
            source = file.open("rb")
        except OSError as error:
            raise InvalidInputError(f"Cannot read {file}: {error.strerror or error}.") from error
        with source:
            size = os.fstat(source.fileno()).st_size
            with atomically(target, size) as temporary, storage_errors(target, size), temporary.open("wb") as copied:
                shutil.copyfileobj(source, copied, 1 << 20)
        copies.append(target)
    return copies


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    return (
        path.stat().st_size
        if path.is_file()
        else sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal, read in blocks."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
