"""Checks of an output directory, made before anything is written there."""

from pathlib import Path

from moetool.checkpoint.identity import is_known_by_earlier
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.names import MANIFEST
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import UsageError
from moetool.job.journal import Journal


def check_directory(output: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise `UsageError` for what is no directory, or for both `resume` and `overwrite`."""
    if resume and overwrite:
        raise UsageError("--resume goes on with what is there, --overwrite throws it away: give one of them.")
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} exists and is not a directory.")


def check_occupied(output: Path, work: Path, *, resume: bool, overwrite: bool, is_begun: bool) -> None:
    """Raise `UsageError` unless something may be written here, where there may be a run that is not finished, whose
    files lie in `work`."""
    occupied = set(output.iterdir()) - {work} if output.is_dir() else set()
    if is_begun and not resume and not overwrite:
        raise UsageError(
            f"{output} is not empty. It holds an unfinished run: --resume goes on with it. "
            "--overwrite deletes what is there."
        )
    if is_begun or not occupied:
        return
    if resume:
        raise UsageError(f"{output} is not empty and holds no unfinished run of moetool: there is nothing to resume.")
    if not (output / MANIFEST).exists():
        raise UsageError(
            f"{output} is not empty and was not written by moetool (no {MANIFEST}): not deleting it, with --overwrite "
            "or without. Remove it yourself or choose another place."
        )
    if not overwrite:
        raise UsageError(f"{output} is not empty. --overwrite deletes what is there.")


def check_settings(output: Path, journal: Journal, fingerprint: str) -> None:
    """Raise `UsageError` where an unfinished run was begun with other settings, or by an earlier moetool."""
    if journal.run in (None, fingerprint):
        return
    if journal.noted is None:
        raise UsageError(
            f"The run in {output} was started by an earlier moetool, which noted less of its input than this one "
            "compares: whether input and settings are still the same cannot be told. Finish it with that moetool, or "
            "start again with --overwrite."
        )
    raise UsageError(
        f"The run in {output} was started with other settings or another input. "
        "Repeat the first command with --resume, or start again with --overwrite."
    )


def check_made_by(output: Path, fingerprint: str, source: Checkpoint | None = None) -> None:
    """Refuse a finished result as what a run would have made; a `source` tells whether an earlier moetool knew it.

    Raises:
        UsageError: it was made with other settings, or by an older moetool, which did not note them.
        InvalidInputError: its manifest is damaged.
    """
    manifest = read_manifest(output)
    made_by = manifest.run
    if made_by is None:
        raise UsageError(f"{output} is finished, and does not say with which settings: there is nothing to resume.")
    if made_by != fingerprint and source is not None and is_known_by_earlier(source, manifest.source_fingerprint):
        raise UsageError(
            f"{output} is finished, and was made by an earlier moetool, which noted less of its input than this one "
            "compares: whether that is still the same cannot be told. --overwrite makes it again."
        )
    if made_by != fingerprint:
        raise UsageError(
            f"{output} is finished, and was made with other settings or from another input. "
            "--overwrite makes it again with these."
        )
