"""Where the results of tasks go: never over others."""

import os
from itertools import count
from pathlib import Path

from moetool.checkpoint.source import local_path


def place_beside(model: str) -> Path:
    """A name that no file has: `NAME.eval.json` beside a checkpoint's directory, or in the current one for a hub id and
    where nobody may write beside it; with a number from the second on."""
    directory = local_path(model)
    here = directory.is_dir() and os.access(directory.resolve().parent, os.W_OK)
    folder = directory.resolve().parent if here else Path.cwd()
    name = directory.resolve().name if directory.is_dir() else model.replace("/", "--")
    names = (f"{name}.eval{'' if number == 1 else f'-{number}'}.json" for number in count(1))
    return next(file for file in map(folder.joinpath, names) if not os.path.lexists(file))
