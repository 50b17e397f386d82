"""Standard input, read alike in any locale, and standard output, written at once."""

import sys
from io import TextIOWrapper
from typing import TextIO


def standard_input() -> TextIO:
    """Standard input. A byte that is not UTF-8 becomes half of a surrogate pair, in any locale, so that whoever reads
    the text can refuse it."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def write_out(text: str) -> None:
    """Write a piece of a text to standard output, where it is seen before the next one comes."""
    print(text, end="", flush=True)
