"""Checks that a job makes before it begins, each within a second, for a run and for `--dry-run`."""

import os
import tempfile
from pathlib import Path

from moetool.calibration.data import check_data
from moetool.checkpoint.files import storage_errors
from moetool.checkpoint.names import check_has_tokenizer
from moetool.checkpoint.source import local_path
from moetool.errors import InvalidInputError, ResourceError, UsageError
from moetool.job.plan import fingerprint
from moetool.job.stage import AnyStage
from moetool.runtime.building import check_sizes

_RESULT_BYTES = 1 << 20  # the most that a page, a table or a picture takes


def check_job(stage: AnyStage, directory: Path) -> None:
    """Check what a stage reads, that it would not write over that, that it could write, and that transformers would
    load the input of a stage that writes a model: else it is no source of one.

    Raises:
        UsageError: the directory is the input or the text, or inside or around one of them.
        InvalidInputError: a text is missing, empty, of an unknown kind, or without its column; or there is a text, and
            no tokenizer for it; or transformers would not load the input.
        ResourceError: the file system takes no file there.
    """
    _refuse_self(stage.source.checkpoint.path, directory, "the input")
    for path in stage.reads():
        _refuse_self(path, directory, f"{path}, which this job reads")
    if texts := stage.texts():
        check_has_tokenizer(stage.source.checkpoint.path)
    for data in texts:
        check_data(data, own=data == getattr(stage.options, "calibration", None))
    there = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.is_dir())
    _try_to_write(directory, there)
    if stage.writes_model:
        check_sizes(stage.source.checkpoint)


def identity(stage: AnyStage) -> str:
    """Fingerprint of a stage's inputs and of the options that decide its result; equal ones give equal bytes."""
    return fingerprint(stage.name, stage.sources(), stage.recipe())


def output_directory(name: str | Path) -> Path:
    """The directory to write to. Raises `UsageError` where none can be made."""
    try:
        path = local_path(name)
    except InvalidInputError as error:
        raise UsageError(str(error)) from error
    above = [path, *path.absolute().parents]
    if (link := next((parent for parent in above if parent.is_symlink() and not parent.exists()), None)) is not None:
        raise UsageError(f"{link} is a link that leads nowhere. Remove it, or choose another place.")
    there = next(parent for parent in above if parent.exists())
    if not there.is_dir() and there != path:
        raise UsageError(f"{path} lies in {there}, which is not a directory.")
    longest = os.pathconf(there, "PC_NAME_MAX")
    if any(len(os.fsencode(part)) > longest for part in path.parts):
        raise UsageError(f"A name in {path} is longer than the {longest} bytes that the file system takes.")
    return path


def output_file(name: str | Path) -> Path:
    """The file to write a result to, such as a page, a table or a picture, in a folder that has room for it.

    Raises:
        UsageError: it is a folder, or lies in none.
        ResourceError: nothing can be written there.
    """
    file = output_directory(name)
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir():
        what = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise UsageError(f"{file}: {what}.")
    if file.is_file() and not os.access(file, os.W_OK):
        raise ResourceError(f"Cannot write {file}: it is there, and may not be changed.")
    if file.is_file() or not file.exists():  # else it is a pipe or a device, such as /dev/stdout
        _try_to_write(file, folder, _RESULT_BYTES)
    return file


def _try_to_write(path: Path, folder: Path, nbytes: int = 0) -> None:
    """Write and delete a file of so many bytes in `folder`. Raises `ResourceError`, which names `path`."""
    with storage_errors(path), tempfile.TemporaryFile(dir=folder) as tried:
        tried.write(bytes(nbytes))
        tried.flush()


def _refuse_self(source: Path, output: Path, what: str) -> None:
    there, here = output.resolve(), source.resolve()
    if there == here or here in there.parents or there in here.parents:
        raise UsageError(f"{output} is {what}, inside it or around it. Write somewhere else.")
