"""The records of a `.jsonl` file, read here and not by `datasets`: it takes columns from all records together, turns
strings that look like times into times, and ends the process at a file that begins with `null`."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from moetool.checkpoint.header import reading
from moetool.errors import InvalidInputError


def json_records(file: Path) -> Iterator[Mapping[str, object]]:
    """One object a line, blank lines aside; or, as some name such a file too, all objects of one array.

    Raises:
        InvalidInputError: the file cannot be read, is not UTF-8, or holds something else; the line is named.
    """
    with reading(file), file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            if number == 1 and line.lstrip().startswith("["):
                rest = lines.read()
                if rest.strip():
                    with contextlib.suppress(ValueError, RecursionError):  # the array of all records goes on
                        _object(json.loads(line), where)
                values = _value(line + rest, where)
                assert isinstance(values, list)
                yield from (_object(value, f"{file}, record {place}") for place, value in enumerate(values, 1))
            elif line.strip():
                yield _object(_value(line, where), where)


def _value(text: str, where: str) -> object:
    try:
        value: object = json.loads(text)
        if "\\u" in text:  # half of a surrogate pair may be escaped, and is no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} cannot be read as JSON: {error}. Mend or remove it.") from error
    return value


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidInputError(f'{where} holds {json.dumps(value)[:80]}, no object such as {{"text": "…"}}.')
    return value
