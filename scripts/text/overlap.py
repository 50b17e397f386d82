"""How much of the bundled text is in other texts: `overlap.py FILE…` counts the runs of 13 words that both have.

A text that models are measured on must not be calibrated on. Exits with 1 where anything is common.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from moetool.calibration.bundled import BundledPiece, pieces

WORDS = 13


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def runs(text: str) -> Iterator[str]:
    """Every run of 13 words."""
    words = words_of(text)
    for start in range(len(words) - WORDS + 1):
        yield " ".join(words[start : start + WORDS])


def common(text: str, bundled: tuple[BundledPiece, ...]) -> dict[str, list[str]]:
    """By `kind/name`, the runs of each piece that `text` has, too."""
    theirs = set(runs(text))
    found = {f"{piece.kind}/{piece.name}": [run for run in runs(piece.text) if run in theirs] for piece in bundled}
    return {name: shared for name, shared in found.items() if shared}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="UTF-8 text to compare with")
    failed = False
    for file in parser.parse_args().files:
        text = file.read_text(encoding="utf-8", errors="replace")
        found = common(text, pieces())
        failed |= bool(found)
        print(f"{file.name}: {len(words_of(text)):,} words, {sum(map(len, found.values()))} common runs")
        for name, shared in found.items():
            print(f"  {name}: {len(shared)}, the first: {shared[0]}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
