"""Scales fitted to codes."""

import pytest
import torch
from draws import normal
from torch import Tensor

from moetool.numerics.error_feedback import Coded, Feedback, feed_back_together
from moetool.numerics.quantization import dequantize, quantize
from moetool.numerics.scale_fitting import fitted_scales

ROWS, COLUMNS, GROUPS = 12, 48, 3


@pytest.fixture
def inputs() -> Tensor:
    """Correlated ones [tokens, in], the first of which are loud."""
    mixed = normal(200, COLUMNS, seed=1) @ normal(COLUMNS, COLUMNS, seed=2) + 3
    mixed[:, :5] *= 10
    return mixed


def coded(matrix: Tensor, gram: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    feedback = Feedback.of(gram)
    assert feedback is not None
    codes, scales = quantize(matrix, bits, COLUMNS // GROUPS, torch.float32, importance=gram.diagonal())
    return feed_back_together([Coded(matrix, scales, bits, codes)], feedback)[0], scales


def lost(matrix: Tensor, decoded: Tensor, gram: Tensor) -> Tensor:
    """What each row loses with the damping of error feedback: [out]."""
    damped = gram.double() + 0.01 * torch.diag(gram.double().diagonal())
    error = (matrix - decoded).double()
    return ((error @ damped) * error).sum(1)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_they_solve_the_least_squares_problem_of_every_row(inputs: Tensor, bits: int) -> None:
    gram, matrix = inputs.T @ inputs, normal(ROWS, COLUMNS, seed=3)
    codes, scales = coded(matrix, gram, bits)
    decoded = dequantize(codes, scales, bits, torch.float32)
    found = fitted_scales(matrix, decoded, scales, gram)
    damped = torch.cat([inputs, torch.diag((0.01 * gram.diagonal()).sqrt())]).double()
    solved = 0
    for row in range(ROWS):
        parts = torch.stack(
            [damped[:, part] @ decoded[row, part].double() for part in torch.arange(COLUMNS).chunk(GROUPS)], 1
        )
        best = torch.linalg.lstsq(parts, (damped @ matrix[row].double())[:, None]).solution.squeeze(1)
        if bool((best > 0).all()):
            # Products of 16 bits may be used, which move the minimum a little and what is lost there hardly.
            fitted = (damped @ matrix[row].double() - parts @ (found[row] / scales[row]).double()).square().sum()
            least = (damped @ matrix[row].double() - parts @ best).square().sum()
            assert fitted <= 1.01 * least
            solved += 1
    assert solved > ROWS // 2


def test_they_do_not_depend_on_how_many_rows_are_in_memory(inputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    gram, matrix = inputs.T @ inputs, normal(ROWS, COLUMNS, seed=3)
    codes, scales = coded(matrix, gram, 2)
    decoded, sizes = dequantize(codes, scales, 2, torch.float32), set[int]()
    together = fitted_scales(matrix, decoded, scales, gram)

    def solved(a: Tensor, b: Tensor) -> object:
        sizes.add(a.numel())
        return solve_ex(a, b)

    solve_ex = torch.linalg.solve_ex
    monkeypatch.setattr("torch.linalg.solve_ex", solved)
    monkeypatch.setattr("moetool.numerics.scale_fitting._AT_ONCE", 5 * GROUPS**2 + 1)
    torch.testing.assert_close(fitted_scales(matrix, decoded, scales, gram), together)
    assert sizes == {5 * GROUPS**2, 2 * GROUPS**2}


def test_codes_of_one_bit_lose_much_less(inputs: Tensor) -> None:
    gram, matrix = inputs.T @ inputs, normal(ROWS, COLUMNS, seed=3)
    codes, scales = coded(matrix, gram, 1)
    before = dequantize(codes, scales, 1, torch.float32)
    after = dequantize(codes, fitted_scales(matrix, before, scales, gram), 1, torch.float32)
    assert lost(matrix, after, gram).sum() < 0.8 * lost(matrix, before, gram).sum()


def test_no_row_loses_more_in_the_dtype_of_the_scales(inputs: Tensor) -> None:
    gram, matrix = inputs.T @ inputs, normal(ROWS, COLUMNS, seed=4)
    codes, scales = coded(matrix, gram, 2)
    scales = scales.bfloat16()
    before = dequantize(codes, scales, 2, torch.float32)
    found = fitted_scales(matrix, before, scales, gram)
    assert found.dtype == torch.bfloat16
    after = dequantize(codes, found, 2, torch.float32)
    assert bool((lost(matrix, after, gram) <= 1.001 * lost(matrix, before, gram)).all())


def test_scales_that_are_off_come_back(inputs: Tensor) -> None:
    gram = inputs.T @ inputs
    right = normal(ROWS, GROUPS, seed=5).abs() + 0.1
    signs = normal(ROWS, COLUMNS, seed=6).sign()
    matrix = signs * right.repeat_interleave(COLUMNS // GROUPS, 1)
    wrong = right * torch.tensor([0.5, 1.0, 2.0])
    found = fitted_scales(matrix, signs * wrong.repeat_interleave(COLUMNS // GROUPS, 1), wrong, gram)
    torch.testing.assert_close(found, right, rtol=2e-2, atol=0)


def test_scales_that_their_dtype_cannot_hold_stay_as_they_are(inputs: Tensor) -> None:
    signs, scales = normal(ROWS, COLUMNS, seed=6).sign(), torch.full((ROWS, GROUPS), 60000.0, dtype=torch.float16)
    assert torch.equal(fitted_scales(200000 * signs, 60000 * signs, scales, inputs.T @ inputs), scales)


def test_what_inputs_do_not_tell_stays_as_it_is(inputs: Tensor) -> None:
    inputs[:, :16] = 0
    gram, matrix = inputs.T @ inputs, normal(ROWS, COLUMNS, seed=7)
    codes, scales = coded(matrix, gram, 2)
    matrix[3], scales[3] = 0, 0
    found = fitted_scales(matrix, dequantize(codes, scales, 2, torch.float32), scales, gram)
    assert bool(found.isfinite().all())
    assert torch.equal(found[:, 0], scales[:, 0])
    assert torch.equal(found[3], scales[3])
    nothing = torch.zeros_like(gram)
    assert torch.equal(fitted_scales(matrix, dequantize(codes, scales, 2, torch.float32), scales, nothing), scales)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_stretched_rows_are_as_large_as_they_were_in_their_direction(inputs: Tensor, bits: int) -> None:
    gram, matrix = inputs.T @ inputs, normal(ROWS, COLUMNS, seed=3)
    codes, scales = coded(matrix, gram, bits)
    decoded = dequantize(codes, scales, bits, torch.float32)
    fitted = fitted_scales(matrix, decoded, scales, gram)
    found = fitted_scales(matrix, decoded, scales, gram, keeps_size=True)
    outputs, goal = inputs @ dequantize(codes, found, bits, torch.float32).T, inputs @ matrix.T
    # Products of 16 bits may be used.
    torch.testing.assert_close((outputs * goal).sum(0), goal.square().sum(0), rtol=0.02, atol=0)
    times = found / fitted
    torch.testing.assert_close(times, times[:, :1].expand_as(times))
    before = dequantize(codes, fitted, bits, torch.float32)
    shrunk = (inputs @ before.T * goal).sum(0) / goal.square().sum(0)
    assert bool((shrunk < 0.999).any()), "there was something to stretch"


def test_no_row_is_stretched_out_of_what_is_known() -> None:
    inputs = torch.eye(4)
    matrix = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 1], [-1, -1, -1, -1], [0, 0, 0, 0]])
    half, little, every = [1.0, 1, 1, 0], [1.0, 0, 0, 0], [1.0, 1, 1, 1]
    decoded, scales = torch.tensor([half, little, every, [0.0] * 4]), torch.ones(4, 1)
    found = fitted_scales(matrix, decoded, scales, inputs.T @ inputs, keeps_size=True)
    torch.testing.assert_close(found[:, 0], torch.tensor([4 / 3, 2, 1, 1]), rtol=1e-2, atol=0)
    assert fitted_scales(matrix, decoded, scales, torch.zeros(4, 4), keeps_size=True).equal(scales)


def test_rows_that_their_dtype_cannot_hold_are_not_stretched(inputs: Tensor) -> None:
    matrix, scales = normal(2, COLUMNS, seed=3), torch.tensor([[60000.0], [1.0]], dtype=torch.float16)
    decoded = matrix.where(torch.arange(COLUMNS) < 24, 0)
    found = fitted_scales(matrix, decoded, scales, torch.eye(COLUMNS), keeps_size=True)
    assert found.isfinite().all()
    assert found[0].equal(scales[0])
    assert found[1] > 1.5
