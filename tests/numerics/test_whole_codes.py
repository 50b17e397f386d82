"""Evenly spaced codes: what they lose, and the words that other engines read."""

import pytest
import torch
from torch import Tensor

from moetool.numerics.whole_codes import WHOLE_BITS, pack_words, quantize_whole

COLUMNS = (8, 12, 64, 97)


def some_codes(bits: int, columns: int) -> Tensor:
    draw = torch.Generator().manual_seed(bits * columns)
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, columns), generator=draw, dtype=torch.int8)


def unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """By shifts of whole words, which the packing does not use."""
    plain = words.to(torch.int64) & 0xFFFFFFFF
    parts = [(plain >> shift) & (2**bits - 1) for shift in range(0, 32, bits)]
    return torch.stack(parts, 2).flatten(1)[:, :columns] - 2 ** (bits - 1)


def error(matrix: Tensor, codes: Tensor, scales: Tensor) -> float:
    group = matrix.shape[1] // scales.shape[1]
    made = codes.double() * scales.double().repeat_interleave(group, 1)
    return float((made - matrix.double()).norm() / matrix.double().norm())


@pytest.mark.parametrize("bits", WHOLE_BITS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_words_hold_the_codes(bits: int, columns: int) -> None:
    codes = some_codes(bits, columns)
    words = pack_words(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (5, -(-columns * bits // 32))
    assert torch.equal(unpacked(words, bits, columns), codes.long())


def test_a_word_by_hand() -> None:
    """−8 … −1 in four bits are 0 … 7, the first one lowest."""
    assert pack_words(torch.arange(-8, 0, dtype=torch.int8)[None], 4).tolist() == [[0x76543210]]
    assert pack_words(torch.tensor([[-128, -127, 0, 1]], dtype=torch.int8), 8).tolist() == [[0x81800100 - 2**32]]


@pytest.mark.parametrize("bits", WHOLE_BITS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_words_are_those_of_the_library(bits: int, columns: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = some_codes(bits, columns)
    assert torch.equal(pack_words(codes, bits), helpers.pack_to_int32(codes, bits))


@pytest.mark.parametrize("bits", WHOLE_BITS)
def test_they_lose_less_than_rounding_does(bits: int) -> None:
    """Than scales by which the whole grid just spans a group's largest magnitude, as min-max observers have them."""
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_whole(matrix, bits, 32, torch.bfloat16)
    groups = matrix.view(64, 8, 32)
    spanned = (groups.abs().amax(2) * 2 / (2**bits - 1)).bfloat16()
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    rounded = (groups / spanned.float()[:, :, None]).round().clamp(low, high).view(64, 256)
    assert error(matrix, codes, scales) < {4: 0.93, 8: 0.99}[bits] * error(matrix, rounded, spanned)
    assert int(codes.min()) >= low
    assert int(codes.max()) <= high


def test_what_is_on_the_grid_stays() -> None:
    codes = some_codes(4, 64)
    codes[:, ::16] = -8
    codes[:, 1::16] = 7
    scales = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)).bfloat16() + 0.5
    matrix = codes.float() * scales.float().repeat_interleave(16, 1)
    assert error(matrix, *quantize_whole(matrix, 4, 16, torch.bfloat16)) == 0


def test_empty_groups_and_extreme_sizes() -> None:
    matrix = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    matrix[0] = 0
    matrix[1] *= 1e-30
    matrix[2] *= 1e30
    codes, scales = quantize_whole(matrix, 4, 16, torch.float32)
    assert not codes[0].any()
    assert all(error(matrix[row : row + 1], codes[row : row + 1], scales[row : row + 1]) < 0.15 for row in (1, 2, 3))


def test_what_does_not_fit_is_refused() -> None:
    matrix = torch.zeros(2, 32)
    with pytest.raises(ValueError, match="not 3"):
        quantize_whole(matrix, 3, 16, torch.float32)
    with pytest.raises(ValueError, match="not 3"):
        pack_words(matrix.to(torch.int8), 3)
    with pytest.raises(ValueError, match="groups of 24"):
        quantize_whole(matrix, 4, 24, torch.float32)
    matrix[1, 3] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        quantize_whole(matrix, 4, 16, torch.float32)
