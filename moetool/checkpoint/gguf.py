"""A GGUF file as an input: written as an ordinary checkpoint once, layer by layer, into a cache, as a download is."""

import hashlib
import logging
import os
import re
import shlex
import shutil
from importlib.metadata import version
from pathlib import Path

from safetensors import SafetensorError

from moetool.checkpoint.gguf_model import GgufModel
from moetool.checkpoint.gguf_parts import first_part, is_gguf, parts_of
from moetool.checkpoint.header import reading
from moetool.checkpoint.names import CONFIG, INDEX, PICKLES, WORK_DIRECTORY
from moetool.checkpoint.sizes import format_bytes
from moetool.errors import InvalidInputError, ResourceError, in_one_line
from moetool.format.gguf.words import IMATRIX, MODEL
from moetool.version import __version__

_LOGGER = logging.getLogger(__name__)

_OTHERS = (*PICKLES, ".safetensors", ".safetensors.tmp", INDEX)  # ends of what a checkpoint is made of
_SAMPLES, _SAMPLE = 64, 1 << 16  # parts of a file that tell it from others, and their bytes


def converted(file: Path, *, weights: bool = True) -> Path:
    """The directory of an ordinary checkpoint with a GGUF file's model, written first if it is not there.

    Args:
        file: the file.
        weights: whether more than config and tokenizer are needed; what there is is taken in any case.

    Raises:
        InvalidInputError: it is cut short or damaged, or its family or a type of its numbers is not known.
        ResourceError: there is no room for the checkpoint.
        UsageError: the library `gguf` is not installed.
    """
    here, digest = _here(file), _digest(file)
    directory = _cache() / f"{here}-{digest}"
    if directory.is_dir():
        return directory
    if not weights and (directory := directory.with_name(f"{directory.name}-config")).is_dir():
        return directory
    _tell_others(file, here, digest)
    unfinished = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    found = GgufModel(file)
    try:
        unfinished.mkdir(parents=True)
        found.write(unfinished, weights=weights)
        if not directory.is_dir():  # another process may have been faster
            unfinished.rename(directory)
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(next(path for path in directory.parents if path.exists())).free
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ResourceError(
            f"Cannot write {file} as a checkpoint into {_cache()}: {reason}. It needs about "
            f"{found.nbytes} bytes, {free} are free. HF_HOME moves it."
        ) from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        # Names, sizes and types in it can be anything, and two libraries work on them.
        reason = in_one_line(error, 200)
        raise InvalidInputError(
            f"{file} is damaged: its metadata or tensors contradict each other ({reason}). Download it again."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _cache() -> Path:
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "moetool" / "gguf"


def _here(file: Path) -> str:
    """The name of a file and, since every export has the same, a digest of where it lies."""
    return f"{file.stem}-{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:8]}"


def _tell_others(file: Path, here: str, digest: str) -> None:
    """Say which conversions there are of what lay there, of other contents or by another moetool."""
    ours = re.compile(rf"{re.escape(here)}-(?!{digest})[0-9a-f]{{16}}(-config)?")
    left = sorted(path for path in _cache().glob("*") if ours.fullmatch(path.name) and path.is_dir())
    if left:
        nbytes = sum(found.stat().st_size for path in left for found in path.rglob("*") if found.is_file())
        named = " ".join(shlex.quote(str(path)) for path in left)
        _LOGGER.warning(
            "%s of earlier conversions of %s are in the cache; what no job works on can go: rm -r %s",
            format_bytes(nbytes),
            file,
            named,
        )


def _digest(file: Path) -> str:
    """Of a file's size, time and some of its content, and of what it is converted by: a file that was made again is
    another, and so is what another moetool or transformers makes of it."""
    digest = hashlib.sha256(f"{__version__} {version('transformers')} ".encode())
    here = Path(__file__)
    families = (here.parents[1] / "format" / "gguf").glob("*.py")
    for source in sorted((*here.parent.glob("gguf*.py"), *families)):
        digest.update(source.read_bytes())
    for part in parts_of(file):
        with reading(part), part.open("rb") as stream:
            stat = part.stat()
            digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
            for position in range(0, stat.st_size, max(_SAMPLE, stat.st_size // _SAMPLES)):
                stream.seek(position)
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:16]


def gguf_files(directory: Path) -> list[Path]:
    """GGUF files of a directory that may be models, sorted by name; of one in several parts the first."""
    files = (file for file in directory.iterdir() if is_gguf(file) and file.name != IMATRIX and file.is_file())
    return sorted({first_part(file) for file in files})


def gguf_in(path: Path) -> Path | None:
    """The GGUF file with the model that a path names: the file itself, or that of a directory without another
    checkpoint, which is the one that `export` has written there, or the only one; of a model in several parts the
    first. `None` if there is no such file."""
    if path.is_file():
        return first_part(path) if is_gguf(path) else None
    if not path.is_dir() or (path / WORK_DIRECTORY).exists():
        return None
    if (path / CONFIG).exists() and any(file.name.endswith(_OTHERS) for file in path.iterdir()):
        return None
    files, exported = gguf_files(path), path / MODEL
    return exported if exported in files else files[0] if len(files) == 1 else None
