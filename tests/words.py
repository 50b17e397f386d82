"""Words of a command line that tests put together: what all cases have, and what one has in its place."""

from collections.abc import Sequence

_SEVERAL_TIMES = ("--source", "--option")  # each of them is meant


def overridden(words: Sequence[object]) -> list[str]:
    """The words as text, without an option and its value where the same option comes later: the command line refuses
    two values."""
    said, kept = list(map(str, words)), list[str]()
    position = 0
    while position < len(said):
        word, value = said[position], said[position + 1 : position + 2]
        has_value = word.startswith("--") and bool(value) and not value[0].startswith("--")
        if has_value and word not in _SEVERAL_TIMES and word in said[position + 2 :]:
            position += 2
            continue
        kept.append(word)
        position += 1
    return kept
