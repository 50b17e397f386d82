"""Codes in words of 32 bits, as other engines read them."""

import pytest
import torch
from torch import Tensor

from moetool.format.compressed_tensors import PACKED_BITS
from moetool.numerics.words import pack_words

BITS = range(1, 9)
COLUMNS = (8, 12, 64, 97)


def some_codes(bits: int, columns: int) -> Tensor:
    draw = torch.Generator().manual_seed(bits * columns)
    return torch.randint(0, 2**bits, (5, columns), generator=draw, dtype=torch.uint8)


def unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """Of each row as one long number, which the packing knows nothing of."""
    rows = [int.from_bytes(row.numpy().astype("<i4").tobytes(), "little") for row in words]
    return torch.tensor([[row >> place * bits & (2**bits - 1) for place in range(columns)] for row in rows])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_words_hold_the_codes(bits: int, columns: int) -> None:
    codes = some_codes(bits, columns)
    words = pack_words(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (5, -(-columns * bits // 32))
    assert torch.equal(unpacked(words, bits, columns), codes.long())


def test_a_word_by_hand() -> None:
    """The first code is in the lowest bits."""
    assert pack_words(torch.arange(8, dtype=torch.uint8)[None], 4).tolist() == [[0x76543210]]
    three = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 3, 7, 7, 7]], dtype=torch.uint8)
    digits = 0o7773_7654_3210  # the eleventh ends in the second word
    assert pack_words(three, 3).tolist() == [[(digits & 0xFFFFFFFF) - 2**32, digits >> 32]]
    assert pack_words(torch.tensor([[0, 1, 128, 129]], dtype=torch.uint8), 8).tolist() == [[0x81800100 - 2**32]]


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_words_are_those_of_the_library(bits: int, columns: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = some_codes(bits, columns)
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)  # the library's own begin below zero
    assert torch.equal(pack_words(codes, bits), helpers.pack_to_int32(signed, bits))


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="not 9"):
        pack_words(torch.zeros(2, 32, dtype=torch.uint8), 9)
