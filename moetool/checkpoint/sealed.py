"""Small JSON files with a digest of their own, by which damage is found where nothing else knows what they held."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from moetool.checkpoint.files import json_bytes, write_json

_DIGEST = "digest"
BROKEN_SEAL = "is not what was written (its own digest differs)"


def write_sealed(file: Path, content: Mapping[str, object]) -> None:
    """An object of JSON and its SHA-256, whole or not at all. Raises `ResourceError` where it cannot be written."""
    write_json(file, _sealed(content))


def read_sealed(file: Path) -> dict[str, object] | None:
    """Read what `write_sealed` wrote; `None` if the file is missing or its digest does not match its content."""
    try:
        data = file.read_bytes()
        content = json.loads(data)
        del content[_DIGEST]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return content if json_bytes(_sealed(content)) == data else None


def _sealed(content: Mapping[str, object]) -> dict[str, object]:
    return {**content, _DIGEST: seal(content)}


def seal(content: Mapping[str, object]) -> str:
    """SHA-256 of what an object of JSON says, in whatever bytes; of one that is sealed, of the rest."""
    rest = {key: value for key, value in content.items() if key != _DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
