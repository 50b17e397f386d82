"""The counter-based generator: files depend on its words, so they are written down here."""

import itertools

import numpy as np
import pytest

from moetool.numerics.counter import below, key, words, words_at

KEY = 0x5F65A64F39245FE9
MASK = (1 << 64) - 1


def word(stream: int, index: int) -> int:
    """One word in Python's whole numbers, as the docstring defines it."""
    z = (stream + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_words_are_those_of_splitmix64() -> None:
    """The published outputs of the reference implementation for the states 0 and 1234567."""
    assert words(0, 0, 3).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert words(1234567, 0, 3).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_pinned_keys_and_words() -> None:
    assert key(17, 3, 5, "gate") == KEY
    assert key(0) == 0xE5EB47421B6D2DB3
    assert key(-1, "a") == 0x24BC149993339A5C
    assert words(KEY, 0, 3).tolist() == [0xB50463F733DC670C, 0x697EEAEB0E0986DF, 0x9A50D20643738482]
    assert words(KEY, 10**12, 2).tolist() == [0xDA533144EA309919, 0x1E436F27405467B5]


def test_bytes_are_little_endian() -> None:
    assert words(0, 0, 1).tobytes() == (0xE220A8397B1DCDAF).to_bytes(8, "little")


@pytest.mark.parametrize("start", [0, 1, 12345, 2**40])
def test_words_are_the_definition(start: int) -> None:
    assert words(KEY, start, 50).tolist() == [word(KEY, start + i) for i in range(50)]


def test_any_order_of_blocks_gives_the_same_words() -> None:
    whole = words(KEY, 0, 100_000)
    edges = [0, 1, 7, 4096, 16384, 16385, 50_000, 99_999, 100_000]
    result = np.zeros_like(whole)
    for start, stop in reversed(list(itertools.pairwise(edges))):
        words(KEY, start, stop - start, result[start:stop])
    assert np.array_equal(whole, result)
    order = np.array([99_999, 0, 50_000, 3, 3])
    assert np.array_equal(words_at(KEY, order), whole[order])


def test_no_words() -> None:
    assert words(KEY, 5, 0).tolist() == []


def test_paths_are_told_apart() -> None:
    paths = [(), (1,), ("1",), (1, 2), (12,), ("1", 2), (1, "2"), ("i1",), (2, 1), ("a", "b"), ("ab",), ("",)]
    keys = {key(0, *path) for path in paths} | {key(1, *path) for path in paths}
    assert len(keys) == 2 * len(paths)


def test_zero_bytes_cannot_forge_a_path() -> None:
    with pytest.raises(ValueError, match="zero bytes"):
        key(0, "a\0sb")


def test_below_is_the_scaled_word() -> None:
    drawn = words(KEY, 0, 1000)
    for bound in (1, 2, 3, 1000, 2**31 - 1, 2**31):
        assert below(drawn, bound).tolist() == [int(w) * bound >> 64 for w in drawn.tolist()]


@pytest.mark.parametrize("bound", [0, -1, 2**31 + 1])
def test_below_refuses(bound: int) -> None:
    with pytest.raises(ValueError, match="bound between"):
        below(words(KEY, 0, 1), bound)
