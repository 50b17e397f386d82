"""Error feedback: never worse in the output than the nearest codes, much better where inputs are correlated."""

import pytest
import torch
from torch import Tensor

from moetool.numerics.error_feedback import feed_back
from moetool.numerics.quantization import BITS, dequantize, quantize
from moetool.representations import Measured
from moetool.representations.quantized import Quantized


def normal(rows: int = 48, columns: int = 128) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def output_errors(matrix: Tensor, codes: Tensor, scales: Tensor, bits: int, gram: Tensor) -> Tensor:
    error = dequantize(codes, scales, bits, torch.float64) - matrix.double()
    return ((error @ gram) * error).sum(1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("condition", [1e4, 1e8])
def test_smaller_output_error_in_every_row(bits: int, condition: float, make_gram) -> None:
    matrix, gram = normal(), make_gram(128, condition)
    codes, scales = quantize(matrix, bits, 64, torch.bfloat16, importance=gram.diagonal())
    before = output_errors(matrix, codes, scales, bits, gram)
    after = output_errors(matrix, feed_back(matrix, scales, bits, gram), scales, bits, gram)
    assert (after <= before * (1 + 1e-6)).all()
    assert after.sum() < 0.8 * before.sum()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_independent_inputs_leave_the_nearest_codes(bits: int) -> None:
    matrix, gram = normal(), torch.diag(torch.rand(128, generator=torch.Generator().manual_seed(1)) + 0.1).double()
    codes, scales = quantize(matrix, bits, 64, torch.bfloat16)
    assert feed_back(matrix, scales, bits, gram).equal(codes)


def test_block_size_hardly_matters(make_gram, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, gram = normal(), make_gram(128, 1e4)
    _, scales = quantize(matrix, 3, 64, torch.bfloat16)
    usual = feed_back(matrix, scales, 3, gram)
    monkeypatch.setattr("moetool.numerics.error_feedback._BLOCK", 7)
    other = feed_back(matrix, scales, 3, gram)
    totals = [float(output_errors(matrix, codes, scales, 3, gram).sum()) for codes in (usual, other)]
    assert totals[0] == pytest.approx(totals[1], rel=0.05)


def test_few_tokens_and_silent_inputs() -> None:
    """A Gram matrix of 20 tokens, ten inputs always zero: not even positive definite."""
    tokens = torch.randn(20, 128, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens[:, 50:60] = 0
    gram, matrix = tokens.T @ tokens, normal()
    codes, scales = quantize(matrix, 2, 64, torch.bfloat16)
    after = output_errors(matrix, feed_back(matrix, scales, 2, gram), scales, 2, gram)
    assert after.sum() < 0.5 * output_errors(matrix, codes, scales, 2, gram).sum()


def test_inputs_that_are_all_zero_leave_the_nearest_codes() -> None:
    matrix = normal()
    codes, scales = quantize(matrix, 2, 64, torch.bfloat16)
    nearest = (dequantize(codes, scales, 2, torch.float64) - matrix).abs()
    silent = feed_back(matrix, scales, 2, torch.zeros(128, 128))
    assert (dequantize(silent, scales, 2, torch.float64) - matrix).abs().sum() <= nearest.sum()


def test_through_the_representation(make_gram) -> None:
    matrix, gram = normal(), make_gram(128, 1e4)

    def error(**options: Tensor) -> float:
        representation = Quantized(2, 64)
        tensors = representation.encode(matrix, torch.bfloat16, Measured(**options))
        difference = representation.decode(tensors, (48, 128), torch.bfloat16).double() - matrix.double()
        return float(((difference @ gram) * difference).sum())

    assert error(gram=gram) < 0.8 * error(importance=gram.diagonal()) < error()


def test_nonsense() -> None:
    matrix = normal()
    _, scales = quantize(matrix, 2, 64, torch.bfloat16)
    for gram in (torch.eye(3), torch.full((128, 128), float("nan"))):
        with pytest.raises(ValueError, match=r"Gram matrix \[128, 128\]"):
            feed_back(matrix, scales, 2, gram)
