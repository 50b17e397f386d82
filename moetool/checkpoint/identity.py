"""Whether the weight files of a checkpoint are still those that they were, beyond what its fingerprint sees.

The fingerprint leaves out most bytes of large tensors. So it is noted, too, when each file was written, and its SHA-256
where somebody has computed that: the hub, whose cache and local folders keep it beside the file, or moetool itself.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from moetool.checkpoint.files import file_sha256
from moetool.checkpoint.header import read_header, reading
from moetool.checkpoint.manifest import Manifest, Origin, manifest_of
from moetool.checkpoint.names import CONFIG, MANIFEST
from moetool.checkpoint.reader import Checkpoint, digest_of
from moetool.errors import InvalidInputError, UsageError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DOWNLOADS = Path(".cache", "huggingface", "download")
_SLACK = 1.0  # seconds from the last byte of a download to the time that is noted for it, as the hub's library has it
_EARLIER_BLOCKS, _EARLIER_BYTES = 32, 4096

# When a file was `written`, in nanoseconds since 1970, and its `sha256` where that is known.
FileState: TypeAlias = dict[str, int | str]
FileStates: TypeAlias = Mapping[str, FileState]


def file_states(checkpoint: Checkpoint) -> dict[str, FileState]:
    """State of each weight file of a checkpoint when it was opened, by name; none where the fingerprint is over every
    byte.

    Raises:
        InvalidInputError: it has a manifest, and that is damaged.
    """
    if checkpoint.is_fingerprinted_whole:
        return {}
    states: dict[str, FileState] = {}
    noted = _noted_by_moetool(checkpoint.path)
    for file, written in zip(checkpoint.weight_files, checkpoint.times, strict=True):
        states[file.name] = {"written": written}
        if digest := hub_sha256(file) or noted.get(file.name):
            states[file.name]["sha256"] = digest
    return states


def check_unchanged(checkpoint: Checkpoint, noted: FileStates, *, said_same: bool = False) -> None:
    """Compare the weight files of a checkpoint, which has the fingerprint that it had, with their states then.

    One that has another time counts as the same if it has the SHA-256 that was noted: by what the hub says of it now,
    or read in full.

    Args:
        checkpoint: as it is now.
        noted: `file_states` of then; files that are not among them are not checked.
        said_same: whether somebody vouches for files of which only the time is known.

    Raises:
        InvalidInputError: a file holds something else.
        UsageError: a file was written again, and nothing tells whether it holds the same.
    """
    if checkpoint.is_fingerprinted_whole:
        return
    unknown = []
    for file, written in zip(checkpoint.weight_files, checkpoint.times, strict=True):
        then = noted.get(file.name, {})
        if not then or then.get("written") == written:
            continue
        if (digest := then.get("sha256")) is None:
            unknown.append(file.name)
        elif (hub_sha256(file) or file_sha256(file)) != digest:
            raise InvalidInputError(
                f"{file} is not the file that this was begun with (its SHA-256 differs). Put that back, or start again "
                "with --overwrite."
            )
    if unknown and not said_same:
        more = f" and {len(unknown) - 1} more files" if len(unknown) > 1 else ""
        raise UsageError(
            f"{checkpoint.path / unknown[0]}{more} was written again since this was begun. The parts that a "
            "fingerprint is made of are the same, and most parts are not. If it holds the same weights (copied or "
            "downloaded again): --resume --same-input. If not: start again with --overwrite."
        )


def check_read(checkpoint: Checkpoint) -> None:
    """Raise `InvalidInputError` if the weight files of a checkpoint were replaced while it was read, as far as the
    fingerprint sees that."""
    with reading(checkpoint.path):
        is_touched = tuple(file.stat().st_mtime_ns for file in checkpoint.weight_files) != checkpoint.times
    if is_touched and Checkpoint.open(checkpoint.path).fingerprint() != checkpoint.fingerprint():
        raise InvalidInputError(
            f"{checkpoint.path} was written again while it was read: the result would be made of two models. "
            "Start again with --overwrite."
        )


def hub_sha256(file: Path) -> str | None:
    """SHA-256 of a file as the hub gave it, if it was downloaded from there and not written since; else `None`.

    In the hub's cache a link leads to a file that is named by its digest. Beside the files of `hf download --local-dir`
    lie the digest and the time of each download.
    """
    target = file.resolve()
    if file.is_symlink() and target.parent.name == "blobs" and _SHA256.fullmatch(target.name):
        return target.name if target.stat().st_mtime_ns <= file.lstat().st_mtime_ns else None
    try:
        told = (file.parent / _DOWNLOADS / f"{file.name}.metadata").read_text(encoding="utf-8").split()
        _, digest, time = told
        is_current = file.stat().st_mtime <= float(time) + _SLACK
    except (OSError, ValueError):
        return None
    return digest if is_current and _SHA256.fullmatch(digest) else None


def _noted_by_moetool(path: Path) -> dict[str, str]:
    """Digests of the files of a checkpoint that were not written after its manifest."""
    if (manifest := manifest_of(path)) is None:
        return {}
    noted, limit = manifest.files, (path / MANIFEST).stat().st_mtime_ns
    files = ((name, path / name) for name in noted)
    return {name: noted[name] for name, file in files if file.is_file() and file.stat().st_mtime_ns <= limit}


def is_known_as(checkpoint: Checkpoint, fingerprint: str) -> bool:
    """Whether a fingerprint is a checkpoint's, also one that an earlier moetool made, from less of the numbers.

    Raises:
        InvalidInputError: a file cannot be read any more.
    """
    return fingerprint == checkpoint.fingerprint() or is_known_by_earlier(checkpoint, fingerprint)


def steps_since(original: Checkpoint, manifest: Manifest) -> tuple[Origin, ...]:
    """The steps from an original to the checkpoint of a manifest, the last one first; empty if that does not name it.

    Raises:
        InvalidInputError: a file of the original cannot be read any more.
    """
    origins = manifest.origins
    found = (number for number, step in enumerate(origins, 1) if is_known_as(original, step.source_fingerprint))
    return origins[: next(found, 0)]


def is_known_by_earlier(checkpoint: Checkpoint, fingerprint: str) -> bool:
    """Whether an earlier moetool had this fingerprint for a checkpoint: of each file 32 blocks, between which most
    tensors lie. Raises `InvalidInputError` where a file cannot be read any more."""
    if checkpoint.is_imagined:
        return False
    with reading(checkpoint.path / CONFIG):
        parts = [(checkpoint.path / CONFIG).read_bytes()]
    for file in checkpoint.weight_files:
        header = read_header(file)
        start = min((info.offset for info in header.tensors.values()), default=header.file_bytes)
        step = max(1, (header.file_bytes - start) // _EARLIER_BLOCKS)
        with reading(file), file.open("rb") as stream:
            blocks = []
            for position in range(start, header.file_bytes, step):
                stream.seek(position)
                blocks.append(stream.read(_EARLIER_BYTES))
        parts += [file.name.encode(), str(header.file_bytes).encode(), header.raw, b"".join(blocks)]
    return digest_of(parts) == fingerprint
