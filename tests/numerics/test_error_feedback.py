"""Error feedback: never worse in the output than the nearest codes, much better where inputs are correlated."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moetool.numerics.error_feedback import Coded, Feedback, feed_back_together
from moetool.numerics.quantization import BITS, Lookup, dequantize, quantize
from moetool.representations import Measured
from moetool.representations.quantized import Quantized


def normal(rows: int = 48, columns: int = 128) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def fed(matrix: Tensor, bits: int, gram: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Nearest codes in groups of 64, those with feedback, and their scales."""
    feedback = Feedback.of(gram)
    assert feedback is not None
    codes, scales = quantize(matrix, bits, 64, torch.bfloat16, importance=importance)
    return codes, feed_back_together([Coded(matrix, scales, bits, codes)], feedback)[0], scales


def output_errors(matrix: Tensor, codes: Tensor, scales: Tensor, bits: int, gram: Tensor) -> Tensor:
    error = dequantize(codes, scales, bits, torch.float64) - matrix.double()
    return ((error @ gram) * error).sum(1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("condition", [1e4, 1e8])
def test_smaller_output_error_in_every_row(bits: int, condition: float, make_gram) -> None:
    matrix, gram = normal(), make_gram(128, condition)
    nearest, codes, scales = fed(matrix, bits, gram, gram.diagonal())
    before = output_errors(matrix, nearest, scales, bits, gram)
    after = output_errors(matrix, codes, scales, bits, gram)
    assert (after <= before * (1 + 1e-6)).all()
    assert after.sum() < 0.8 * before.sum()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_independent_inputs_leave_the_nearest_codes(bits: int) -> None:
    matrix, gram = normal(), torch.diag(torch.rand(128, generator=torch.Generator().manual_seed(1)) + 0.1).double()
    nearest, codes, _ = fed(matrix, bits, gram)
    assert codes.equal(nearest)


def test_block_size_hardly_matters(make_gram, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, gram = normal(), make_gram(128, 1e4)
    _, usual, scales = fed(matrix, 3, gram)
    monkeypatch.setattr("moetool.numerics.error_feedback._BLOCK", 7)
    _, other, _ = fed(matrix, 3, gram)
    totals = [float(output_errors(matrix, codes, scales, 3, gram).sum()) for codes in (usual, other)]
    assert totals[0] == pytest.approx(totals[1], rel=0.05)


def test_nothing_holds_the_links_afterwards(make_gram: Callable[[int, float], Tensor]) -> None:
    """One matrix per expert, of 800 MB at Mixtral's width: it must not wait for the garbage collector."""
    feedback = Feedback.of(make_gram(128, 1e4))
    assert feedback is not None
    matrix, links = normal(), weakref.ref(feedback.links)
    gc.disable()
    try:
        codes, scales = quantize(matrix, 2, 64, torch.bfloat16)
        feed_back_together([Coded(matrix, scales, 2, codes)], feedback)
        del feedback
        assert links() is None
    finally:
        gc.enable()


def test_few_tokens_and_silent_inputs() -> None:
    """A Gram matrix of 20 tokens, ten inputs always zero: not even positive definite."""
    tokens = torch.randn(20, 128, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens[:, 50:60] = 0
    gram, matrix = tokens.T @ tokens, normal()
    nearest, codes, scales = fed(matrix, 2, gram)
    after = output_errors(matrix, codes, scales, 2, gram)
    assert after.sum() < 0.5 * output_errors(matrix, nearest, scales, 2, gram).sum()


def test_inputs_that_are_all_zero_leave_the_nearest_codes() -> None:
    matrix = normal()
    assert Feedback.of(torch.zeros(128, 128)) is None
    silent = Quantized(2, 64).encode(matrix, torch.bfloat16, Measured(torch.zeros(128, 128)))
    assert silent["codes"].equal(Quantized(2, 64).encode(matrix, torch.bfloat16)["codes"])


def test_the_factor_is_that_of_the_damped_gram_matrix(make_gram) -> None:
    gram = make_gram(128, 1e4)
    feedback = Feedback.of(gram)
    assert feedback is not None
    root = feedback.links.double() * feedback.pivots.double().sqrt()
    mean = gram.diagonal().mean()
    damped = gram[feedback.order][:, feedback.order] / mean + feedback.damping.double().diag()
    torch.testing.assert_close(root @ root.T, damped, rtol=1e-5, atol=1e-5)
    assert feedback.damping[0] > feedback.damping[-1]


def test_through_the_representation(make_gram) -> None:
    matrix, gram = normal(), make_gram(128, 1e4)

    def error(**options: Tensor) -> float:
        representation = Quantized(2, 64)
        tensors = representation.encode(matrix, torch.bfloat16, Measured(**options))
        difference = representation.decode(tensors, (48, 128), torch.bfloat16).double() - matrix.double()
        return float(((difference @ gram) * difference).sum())

    assert error(gram=gram) < 0.8 * error(gram=gram.diagonal().diag()) < error()


def test_measured_once_for_several_matrices(make_gram) -> None:
    measured = Measured(make_gram(128, 1e4))
    once = measured.with_feedback()
    assert once.feedback is not None
    assert once.with_feedback() is once
    for bits in (2, 3):
        form = Quantized(bits, 64)
        first, second = (form.encode(normal(), torch.bfloat16, each) for each in (measured, once))
        assert first["codes"].equal(second["codes"])


def test_nonsense(make_gram) -> None:
    for gram in (torch.ones(3, 4), torch.full((128, 128), float("nan"))):
        with pytest.raises(ValueError, match="finite Gram matrix"):
            Feedback.of(gram)
    with pytest.raises(ValueError, match=r"Gram matrix \[128, 128\], not of 64"):
        fed(normal(), 2, make_gram(64, 10.0))


def test_matrices_together_get_the_codes_that_each_gets_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(200, 64, generator=generator)
    feedback = Feedback.of((inputs.T @ inputs).double())
    assert feedback is not None
    parts, alone = [], []
    for rows, bits in ((5, 1), (9, 4), (3, 2), (9, 4)):
        matrix = torch.randn(rows, 64, generator=generator)
        codes, scales = quantize(matrix, bits, 16, torch.float32)
        parts.append(Coded(matrix, scales, bits))
        alone += feed_back_together([Coded(matrix, scales, bits, codes)], feedback)
    for found, expected in zip(feed_back_together(parts, feedback), alone, strict=True):
        assert found.equal(expected)
    wide = Coded(parts[0].matrix, parts[0].scales, 6)
    with pytest.raises(ValueError, match="whole numbers"):
        feed_back_together([*parts, wide], feedback)


@pytest.mark.parametrize("bits", [(1, 2, 4), (3,), (6,), (8,)])
def test_compiled_codes_are_those_of_torch(
    bits: tuple[int, ...], make_gram: Callable[[int, float], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those that lie between two levels but for rounding, and what these move."""
    if not Lookup([(2, 1)], torch.ones(1, 1)).is_compiled:
        pytest.skip("there is no compiler")
    feedback = Feedback.of(make_gram(128, 1e4))
    assert feedback is not None
    parts = []
    for own in bits:
        codes, scales = quantize(normal(70), own, 64, torch.bfloat16)
        parts.append(Coded(normal(70), scales, own, codes))
    compiled = feed_back_together(parts, feedback)
    monkeypatch.setattr(Lookup, "is_compiled", False)
    plain = feed_back_together(parts, feedback)
    assert sum(int((one != other).sum()) for one, other in zip(compiled, plain, strict=True)) < 0.01 * 70 * 128
    assert not any(one.equal(part.codes) for one, part in zip(compiled, parts, strict=True))
