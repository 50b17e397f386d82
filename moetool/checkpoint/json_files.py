"""Reading of a checkpoint's JSON files, each of which holds an object."""

import json
from collections.abc import Callable
from pathlib import Path

from moetool.errors import InvalidInputError
from moetool.format.validation import check_depth


def read_object(file: Path, missing: Callable[[], str]) -> tuple[bytes, dict[str, object]]:
    """A JSON file as its bytes and the object they hold; `missing` says what it means that there is none.

    Raises:
        InvalidInputError: it is not there, cannot be read, or holds something else.
    """
    try:
        content = file.read_bytes()
        parsed = json.loads(content)
    except FileNotFoundError:
        raise InvalidInputError(missing()) from None
    except OSError as error:
        raise InvalidInputError(f"Cannot read {file}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{file} is not valid JSON ({error}). Download or write it again.") from error
    if not isinstance(parsed, dict):
        raise InvalidInputError(f"{file} holds a JSON {type(parsed).__name__}, not an object.")
    check_depth(parsed, file)
    return content, parsed
