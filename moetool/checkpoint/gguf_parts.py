"""Files that a GGUF model is split into, by the names that llama.cpp (`llama-gguf-split`) gives them and looks for."""

import re
from pathlib import Path

from moetool.errors import InvalidInputError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, by its suffix."""
    return path.suffix.lower() == ".gguf"


def first_part(file: Path) -> Path:
    """The file of a model that has its metadata: the first of its parts, or the file itself if that is no part."""
    return file if (found := _PART.fullmatch(file.name)) is None else _part(file, found, 1)


def whole_name(name: str) -> str:
    """The name of a file without the number of a part in it."""
    return name if (found := _PART.fullmatch(name)) is None else found[1] + found[4]


def parts_of(file: Path) -> tuple[Path, ...]:
    """All files of the model that one of them names.

    Raises:
        InvalidInputError: a part is missing.
    """
    if (found := _PART.fullmatch(file.name)) is None:
        return (file,)
    count = int(found[3])
    parts = [_part(file, found, number) for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise InvalidInputError(
            f"{file} is one of {count} parts of a model, and {len(missing)} of them are missing: {missing[0]}. "
            "Download all of them into one directory."
        )
    return tuple(parts)


def _part(file: Path, found: re.Match[str], number: int) -> Path:
    """Another part of the model that `file` is one of, by what `_PART` has found in its name."""
    return file.with_name(f"{found[1]}-{number:05d}-of-{found[3]}{found[4]}")
