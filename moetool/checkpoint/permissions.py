"""File permissions of what moetool writes, so that others can read it as any new file."""

import os
from pathlib import Path


def open_to_readers(*files: Path) -> None:
    """Give files the permissions of any other new file: the safetensors library keeps what it writes from everybody but
    its owner."""
    mask = os.umask(0)
    os.umask(mask)
    for file in files:
        file.chmod(0o666 & ~mask)
