"""Evenly spaced codes: what they lose, and the words that other engines read."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moetool.compiled import compiler
from moetool.numerics.compiled_rounding import CompiledRounding
from moetool.numerics.error_feedback import Feedback
from moetool.numerics.whole_codes import WHOLE_BITS, feed_back_whole, pack_words, quantize_whole

COLUMNS = (8, 12, 64, 97)


def some_codes(bits: int, columns: int) -> Tensor:
    draw = torch.Generator().manual_seed(bits * columns)
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, columns), generator=draw, dtype=torch.int8)


def unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """Of each row as one long number, which the packing knows nothing of."""
    rows = [int.from_bytes(row.numpy().astype("<i4").tobytes(), "little") for row in words]
    last = 2**bits - 1
    return torch.tensor([[(row >> place * bits & last) - 2 ** (bits - 1) for place in range(columns)] for row in rows])


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
    three = torch.tensor([[-4, -3, -2, -1, 0, 1, 2, 3, -1, 3, 3, 3]], dtype=torch.int8)
    digits = 0o7773_7654_3210  # the eleventh ends in the second word
    assert pack_words(three, 3).tolist() == [[(digits & 0xFFFFFFFF) - 2**32, digits >> 32]]
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
    assert error(matrix, codes, scales) < {2: 0.75, 3: 0.85, 4: 0.88, 8: 0.99}[bits] * error(matrix, rounded, spanned)
    assert int(codes.min()) >= low
    assert int(codes.max()) <= high


@pytest.mark.parametrize("bits", WHOLE_BITS)
def test_feedback_loses_less_in_the_output_and_in_no_row_more(bits: int) -> None:
    draw = torch.Generator().manual_seed(bits)
    matrix = torch.randn(48, 64, generator=draw)
    inputs = torch.randn(256, 16, generator=draw) @ torch.randn(16, 64, generator=draw)
    gram = (inputs.T @ inputs).double()
    nearest, scales = quantize_whole(matrix, bits, 16, torch.float32, importance=gram.diagonal())
    feedback = Feedback.of(gram)
    assert feedback is not None
    chosen = feed_back_whole(matrix, nearest, scales, bits, feedback)
    assert chosen.dtype == torch.int8
    assert (int(chosen.min()), int(chosen.max())) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

    def lost(codes: Tensor) -> Tensor:
        left = matrix.double() - codes * scales.double().repeat_interleave(16, 1)
        return ((left @ gram) * left).sum(1)

    assert bool((lost(chosen) <= lost(nearest) * (1 + 1e-5)).all())
    assert float(lost(chosen).sum()) < 0.5 * float(lost(nearest).sum())


@pytest.mark.parametrize("bits", WHOLE_BITS)
def test_compiled_codes_are_those_of_torch(
    bits: int, make_gram: Callable[[int, float], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those that lie between two numbers but for rounding, and what these move."""
    if compiler.problem():
        pytest.skip("there is no compiler")
    matrix = torch.randn(70, 128, generator=torch.Generator().manual_seed(bits))
    gram = make_gram(128, 1e4)
    feedback = Feedback.of(gram)
    assert feedback is not None
    nearest, scales = quantize_whole(matrix, bits, 32, torch.bfloat16, importance=gram.diagonal())
    compiled = feed_back_whole(matrix, nearest, scales, bits, feedback)
    monkeypatch.setattr(CompiledRounding, "is_compiled", False)
    plain = feed_back_whole(matrix, nearest, scales, bits, feedback)
    assert int((compiled != plain).sum()) < 0.01 * matrix.numel()
    assert not compiled.equal(nearest)


def test_what_counts_more_is_nearer() -> None:
    matrix = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    importance = torch.ones(32)
    importance[:4] = 100.0

    def lost(codes: Tensor, scales: Tensor) -> float:
        return float((matrix - codes * scales)[:, :4].square().sum())

    even, counted = (quantize_whole(matrix, 2, 32, torch.float32, importance=by) for by in (None, importance))
    assert lost(*counted) < 0.6 * lost(*even)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_grid_reaches_farther_on_the_side_that_needs_it(bits: int) -> None:
    """A group and its negative are as near to their codes."""
    reach = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).repeat(2)[None].float()
    for matrix in (reach, -reach):
        assert error(matrix, *quantize_whole(matrix, bits, reach.shape[1], torch.float32)) < 1e-6


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
    with pytest.raises(ValueError, match="not 5"):
        quantize_whole(matrix, 5, 16, torch.float32)
    with pytest.raises(ValueError, match="not 5"):
        pack_words(matrix.to(torch.int8), 5)
    with pytest.raises(ValueError, match="groups of 24"):
        quantize_whole(matrix, 4, 24, torch.float32)
    matrix[1, 3] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        quantize_whole(matrix, 4, 16, torch.float32)
