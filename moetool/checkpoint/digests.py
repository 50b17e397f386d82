"""Whether the files of a checkpoint are those that were written, by the digests in its manifest."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from moetool.checkpoint.files import file_sha256
from moetool.checkpoint.manifest import Manifest
from moetool.checkpoint.names import COSTS, MANIFEST, WORK_DIRECTORIES
from moetool.checkpoint.sealed import BROKEN_SEAL, read_sealed, seal
from moetool.checkpoint.source import DOCUMENTS, DOWNLOADED

# The hub writes them itself.
_OF_THE_HUB = {".gitattributes"}


@dataclass(frozen=True)
class FileCheck:
    """Outcome of checking files: problems, and notes on what is unusual but valid."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_files(path: Path, manifest: Manifest, *, edited: bool = False, trusted: Collection[str] = ()) -> FileCheck:
    """Compare all files with the digests that were noted when they were written, the manifest and the job's costs
    with their own.

    Manifests of format 1 hold digests of the weight files only, and none of their own.

    Args:
        path: of the checkpoint.
        manifest: as it was read from there.
        edited: whether somebody has worked on the documents (`DOCUMENTS`) since, which is a note then.
        trusted: files that need not be read.
    """
    found = FileCheck()
    if manifest.format_version > 1 and manifest.digest != seal(json.loads((path / MANIFEST).read_bytes())):
        found.problems.append(f"{MANIFEST} {BROKEN_SEAL}")
    elif manifest.has_card and read_sealed(path / MANIFEST) is None:
        found.problems.append(f"{MANIFEST} is not what was written (it says the same, in other bytes)")
    for name, digest in manifest.files.items():
        is_document = any(fnmatch(Path(name).name, pattern) for pattern in DOCUMENTS)
        if not (path / name).is_file():
            # What the hub holds beside a model is not downloaded.
            counts = not is_document and any(fnmatch(name, pattern) for pattern in DOWNLOADED)
            (found.problems if counts else found.notes).append(f"{name} is missing")
        elif name not in trusted and file_sha256(path / name) != digest:
            told = f"{name} is not the file that was written (its SHA-256 differs from the one in {MANIFEST})"
            if is_document and (edited or name in _OF_THE_HUB):
                found.notes.append(told)
            else:
                found.problems.append(f"{told}; if it was edited: --edited-documents" if is_document else told)
    if (path / COSTS).exists() and read_sealed(path / COSTS) is None:
        found.problems.append(f"{COSTS} {BROKEN_SEAL}: delete it, only report reads it")
    if manifest.format_version > 1 and (added := sorted(_present(path) - manifest.files.keys())):
        more = ", …" if len(added) > 5 else ""
        found.notes.append(f"added since it was written: {', '.join(added[:5])}{more}")
    return found


def _present(path: Path) -> set[str]:
    """Names of all files of a checkpoint but those that have digests of their own."""
    return {file.relative_to(path).as_posix() for file in files_of(path)} - {MANIFEST, COSTS}


def files_of(path: Path) -> list[Path]:
    """List all files of a checkpoint's directory, sorted, without those of tools (`.git`, `.cache`, `.moetool`)."""
    found = (file for top in path.iterdir() if top.name not in WORK_DIRECTORIES for file in [top, *top.rglob("*")])
    return sorted(file for file in found if file.is_file())
