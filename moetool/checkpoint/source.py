"""Where a checkpoint comes from: a local directory, a GGUF file, or a repository on the Hugging Face hub."""

import errno
from pathlib import Path

from moetool.checkpoint.gguf_parts import is_gguf, whole_name
from moetool.checkpoint.names import CONFIG
from moetool.errors import InvalidInputError, ResourceError

# No pickles, no code and no weights in other formats ever leave the hub on our account.
DOWNLOADED = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "*.md",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
]
# For people: no program reads them, and whoever shares a model writes them.
DOCUMENTS = ["*.md", "LICENSE*", "NOTICE*", "USE_POLICY*", ".gitattributes"]
# The same weights a second time, in the layout of the model's authors.
NOT_DOWNLOADED = ["consolidated*", "original/*"]


def resolve_source(source: str | Path, *, weights: bool = True) -> Path:
    """The local directory of a checkpoint, downloaded first if `source` is a hub id.

    Args:
        source: a directory, a GGUF file or the directory of one, or a hub id such as `mistralai/Mixtral-8x7B-v0.1`.
            What exists locally wins.
        weights: whether anything but `config.json` has to be downloaded.

    Raises:
        InvalidInputError: no such directory, no such repository, or the hub cannot be reached.
        ResourceError: the disk is full.
    """
    refuse_missing(source)
    from moetool.checkpoint.gguf import converted, gguf_in  # loads torch, which a wrong path need not wait for

    path = local_path(source)
    if (file := gguf_in(path)) is not None:
        return converted(file, weights=weights)
    if path.is_dir():
        return path
    if path.exists():
        raise InvalidInputError(f"{source} is a file; give the directory of the checkpoint, or a .gguf file.")
    return _download(str(source), DOWNLOADED if weights else [CONFIG])


def refuse_missing(source: str | Path) -> None:
    """Raise `InvalidInputError` for a checkpoint that is not there and has no name that a repository of the hub has."""
    path = local_path(source)
    if path.exists():
        return
    if is_gguf(path):
        raise InvalidInputError(f"No such file: {source}. Files on the hub have to be downloaded first (hf download).")
    if isinstance(source, Path) or looks_local(source):
        raise InvalidInputError(f"No such directory: {source}. Give a checkpoint's directory or a hub id (owner/name).")


def local_path(name: str | Path) -> Path:
    """A path with its `~` expanded; there need not be anything.

    Raises:
        InvalidInputError: it is empty, or no system call would take it: it is too long, holds a NUL byte, leads through
            a directory that may not be searched, or names a user that does not exist; or it is not UTF-8, in which
            safetensors takes paths.
    """
    if not str(name):
        raise InvalidInputError("An empty name is no path.")
    try:
        str(name).encode()
        path = Path(name).expanduser()
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:
        shown = str(name).replace("\0", "\\0")
        shown = shown if len(shown) <= 80 else f"{shown[:60]}… ({len(shown)} characters)"
        reason = (error.strerror if isinstance(error, OSError) else str(error)) or str(error)
        raise InvalidInputError(f"{shown} cannot be a path: {reason.rstrip('.')}.") from error
    return path


def model_name(source: str) -> str:
    """What a model is called in titles and in names of what is made of it: the last part of its path or hub id, without
    the suffix of a GGUF file and the number of a part; its directory's if it has the name that `export` gives to all
    such files."""
    from moetool.format.gguf.words import MODEL  # loads torch

    path = Path(source)
    if path.name == MODEL:
        path = path.absolute().parent
    return whole_name((path.resolve() if path.name in ("", "..") else path).name).removesuffix(".gguf")


def is_here(name: str) -> bool:
    """Whether a name is a path that exists on this machine; a hub id is not."""
    try:
        return bool(name) and local_path(name).exists()
    except InvalidInputError:
        return False


def looks_local(source: str) -> bool:
    """Whether a name that does not exist locally was nevertheless meant as a path and not as a hub id."""
    return source in ("", ".", "..") or source.startswith(("/", "./", "../", "~")) or source.count("/") > 1


def check_repository(name: str) -> None:
    """Raise `InvalidInputError` for a name that no repository of the hub can have. The hub is not asked."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InvalidInputError(
            f"{name!r} is neither a file or directory here nor a name that a repository of the hub can have: "
            f"{first_line(error)}."
        ) from error


def _download(name: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        local = snapshot_download(name, allow_patterns=files, ignore_patterns=NOT_DOWNLOADED)
    except GatedRepoError as error:
        raise InvalidInputError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name} and log in with `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InvalidInputError(
            f"{name!r} is neither a directory here nor a repository on the hub that you can read. "
            "Check the spelling; for a private repository log in with `hf auth login`."
        ) from error
    except Exception as error:  # the transport library differs between versions of huggingface_hub
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"Downloading {name}: the disk is full. Free some, or move HF_HOME.") from error
        raise InvalidInputError(
            f"{name!r} is not a directory here, and downloading it from the hub failed ({first_line(error)}). "
            "Check the connection, or download it elsewhere and give the directory."
        ) from error
    return Path(local)


def first_line(error: BaseException) -> str:
    """First line of a library's error message, without its full stop, or all of them where it only announces the others
    (`… one of:`); the class's name if there is no message."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    told = " ".join(lines) if lines and lines[0].endswith(":") else next(iter(lines), "")
    return told.rstrip(".") or type(error).__name__
