"""Codes and scales for outputs: wider scales where inputs tell of each other, those of the nearest codes where not."""

import pytest
import torch
from coders import GROUP, started
from draws import normal
from torch import Tensor

from moetool.numerics import trellis
from moetool.numerics.error_feedback import Coded, Feedback
from moetool.numerics.level_codes import LevelCodes
from moetool.numerics.output_codes import Coder, coded_for_outputs
from moetool.numerics.scale_fitting import fitted_scales

ROWS, COLUMNS = 48, 256
# With what share of the errors that fitting alone leaves wider scales get by.
CODERS: list[tuple[Coder, int, float]] = [
    (LevelCodes(), 1, 0.8),
    (LevelCodes(), 2, 0.93),
    (LevelCodes(), 3, 0.98),
    (trellis.TrellisCodes(), 1, 0.75),
    (trellis.TrellisCodes(), 2, 0.93),
]
every_coder = pytest.mark.parametrize(("coder", "bits", "share"), CODERS)


def feedback_of(inputs: Tensor) -> Feedback:
    found = Feedback.of((inputs.T @ inputs).double())
    assert found is not None
    return found


@pytest.fixture
def alike() -> Feedback:
    """Of inputs that tell much of each other: they lie near a space of an eighth of their dimensions."""
    shared = normal(4000, COLUMNS // 8, seed=1) @ normal(COLUMNS // 8, COLUMNS, seed=2)
    return feedback_of(shared + 0.3 * normal(4000, COLUMNS, seed=3))


def part(coder: Coder, bits: int) -> Coded:
    return started(coder, bits, normal(ROWS, COLUMNS, seed=4))


def lost(own: Coded, codes: Tensor, scales: Tensor, coder: Coder, feedback: Feedback) -> float:
    return float(feedback.output_errors(own.matrix - coder.decoded(codes, scales, own.bits)).sum())


@every_coder
def test_wider_scales_lose_less_than_fitting_alone(coder: Coder, bits: int, share: float, alike: Feedback) -> None:
    own = part(coder, bits)
    [codes] = coder.fed_back([own], alike)
    fitted = fitted_scales(own.matrix, coder.decoded(codes, own.scales, bits), own.scales, alike.gram)
    [found] = coded_for_outputs([own], coder, alike)
    assert lost(own, *found, coder, alike) < share * lost(own, codes, fitted, coder, alike)


@every_coder
def test_inputs_that_tell_nothing_of_each_other_leave_scales_to_fitting(coder: Coder, bits: int, share: float) -> None:
    feedback, own = feedback_of(normal(4000, COLUMNS, seed=5)), part(coder, bits)
    assert feedback.flatness > 0.9
    [codes] = coder.fed_back([own], feedback)
    decoded = coder.decoded(codes, own.scales, bits)
    fitted = fitted_scales(own.matrix, decoded, own.scales, feedback.gram)
    stretched = fitted_scales(own.matrix, decoded, own.scales, feedback.gram, keeps_size=True)
    [found] = coded_for_outputs([own], coder, feedback)
    assert found[0].equal(codes)
    assert found[1].equal(stretched)
    [found] = coded_for_outputs([own], coder, feedback, keeps_size=False)
    assert found[0].equal(codes)
    assert found[1].equal(fitted)


def test_flatness_is_the_root_of_the_determinant_of_correlations(alike: Feedback) -> None:
    gram = alike.gram + 0.01 * alike.gram.diagonal().diag()
    size = gram.diagonal().sqrt()
    expected = torch.linalg.slogdet(gram / size / size[:, None]).logabsdet.div(COLUMNS).exp()
    assert alike.flatness == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_many_bits_keep_their_scales(bits: int, alike: Feedback) -> None:
    own = part(LevelCodes(), bits)
    [(codes, scales)] = coded_for_outputs([own], LevelCodes(), alike)
    assert scales.equal(own.scales)
    assert codes.equal(LevelCodes().fed_back([own], alike)[0])


def test_matrices_together_get_what_each_gets_alone(alike: Feedback) -> None:
    """But for the last bit of sums over other numbers of rows."""
    parts = [part(LevelCodes(), bits) for bits in (1, 8, 3, 2)]
    together = coded_for_outputs(parts, LevelCodes(), alike)
    for own, (codes, scales) in zip(parts, together, strict=True):
        [alone] = coded_for_outputs([own], LevelCodes(), alike)
        assert codes.equal(alone[0])
        torch.testing.assert_close(scales, alone[1])


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_any_number_of_rows(rows: int, alike: Feedback) -> None:
    own = part(LevelCodes(), 1)
    few = Coded(own.matrix[:rows], own.scales[:rows], 1)
    [(codes, scales)] = coded_for_outputs([few], LevelCodes(), alike)
    assert codes.shape == (rows, COLUMNS)
    assert scales.shape == (rows, COLUMNS // GROUP)
    assert scales.isfinite().all()
