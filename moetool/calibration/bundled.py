"""The text that comes with moetool for calibration: prose, code, mathematics, dialogue and more, about three megabytes.

`scripts/text` has its readable sources with their licenses (public domain, CC0 and what waives as much, or written for
moetool); `scripts/text/pack.py` packs them into `text.xz`, which is one JSON array of `[kind, name, text]`.
"""

import json
import lzma
from functools import cache
from pathlib import Path
from typing import NamedTuple

from moetool.errors import UsageError, did_you_mean

PACKED = Path(__file__).with_name("text.xz")


class BundledPiece(NamedTuple):
    """One piece of the bundled text.

    Attributes:
        kind: one of `kinds()`, such as `code`.
        name: what it is called among its kind, such as `python-aes`.
        text: all of it, in lines that end with a newline.
    """

    kind: str
    name: str
    text: str


@cache
def pieces() -> tuple[BundledPiece, ...]:
    """Return every piece of the bundled text, sorted by kind and name, in the same order on every machine."""
    return tuple(BundledPiece(*row) for row in json.loads(lzma.decompress(PACKED.read_bytes())))


def kinds(named: str | None = None) -> tuple[str, ...]:
    """The kinds of text that there are, in alphabetical order, or the one that is `named` alone.

    Raises:
        UsageError: there is no such kind.
    """
    there = tuple(dict.fromkeys(piece.kind for piece in pieces()))
    if named is None:
        return there
    if named not in there:
        raise UsageError(f"The bundled text has no kind {named!r}: {', '.join(there)}.{did_you_mean(named, there)}")
    return (named,)


def texts(kind: str) -> list[str]:
    """The texts of one kind, ordered by name. Raises `UsageError` if there is no such kind."""
    [named] = kinds(kind)
    return [piece.text for piece in pieces() if piece.kind == named]
