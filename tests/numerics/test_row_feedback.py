"""Rows that are coded in turn make good for each other's errors, as the factors of the metric say."""

from dataclasses import dataclass

import pytest
import torch
from coders import started
from draws import normal
from torch import Tensor

from moetool.numerics import row_feedback, trellis
from moetool.numerics.error_feedback import Feedback
from moetool.numerics.level_codes import LevelCodes
from moetool.numerics.output_codes import Coder, coded_for_outputs, coded_in_turn
from moetool.numerics.row_feedback import RowFeedback, rows_together, upper_links

ROWS, COLUMNS = 96, 64
CODERS: list[tuple[Coder, int, float]] = [  # with the share of the loss that is left at most
    (LevelCodes(), 1, 0.6),
    (LevelCodes(), 2, 0.4),
    (LevelCodes(), 3, 0.35),
    (LevelCodes(), 4, 0.3),
    (trellis.TrellisCodes(), 1, 0.6),
    (trellis.TrellisCodes(), 2, 0.3),
    (trellis.TrellisCodes(), 3, 0.2),
    (trellis.TrellisCodes(), 4, 0.15),
]
every_coder = pytest.mark.parametrize(("coder", "bits", "share"), CODERS)


def second_moment(size: int, seed: int) -> Tensor:
    """Of what lies near a space of an eighth of its dimensions."""
    rows = normal(2000, size // 8, seed=seed) @ normal(size // 8, size, seed=seed + 1)
    rows = rows + 0.5 * normal(2000, size, seed=seed + 2)
    return rows.T @ rows / 2000


@dataclass(frozen=True)
class Whole:
    """A metric that is one matrix."""

    moment: Tensor

    def among(self, rows: Tensor) -> Tensor:
        return self.moment[rows][:, rows].clone()


def lost(errors: Tensor, outputs: Tensor, inputs: Tensor) -> float:
    return float(((outputs @ errors) * (errors @ inputs)).sum())


def in_turn(coder: Coder, bits: int, matrix: Tensor, feedback: Feedback, outputs: Tensor) -> Tensor:
    """What a matrix has become, decoded as a whole."""
    order = coder.order(len(matrix), bits)
    rows = RowFeedback(Whole(outputs), order, matrix, torch.full((len(matrix),), coder.noise.get(bits, 0.0)))
    codes, scales = coded_in_turn(len(matrix), lambda own: started(coder, bits, own), coder, feedback, rows)
    back = order.argsort()
    return coder.decoded(codes[back], scales[back], bits)


@pytest.fixture
def matrix() -> Tensor:
    return normal(ROWS, COLUMNS, seed=9)


@pytest.fixture
def outputs() -> Tensor:
    return second_moment(ROWS, 20)


@pytest.fixture
def feedback() -> Feedback:
    found = Feedback.of(second_moment(COLUMNS, 30) * 2000)
    assert found is not None
    return found


def test_the_loss_is_a_sum_over_rows(outputs: Tensor) -> None:
    inputs, errors = second_moment(COLUMNS, 30).double(), normal(ROWS, COLUMNS, seed=1).double()
    links, pivots = upper_links(outputs.double())
    assert links.tril(-1).count_nonzero() == 0
    moved = links.T @ errors
    by_row = pivots @ ((moved @ inputs) * moved).sum(1)
    assert float(by_row) == pytest.approx(lost(errors, outputs.double(), inputs))


def test_targets_hold_the_errors_of_all_rows_before(matrix: Tensor, outputs: Tensor) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    rows, coded = RowFeedback(Whole(outputs), order, matrix, torch.zeros(ROWS)), torch.zeros_like(matrix)
    links = upper_links(outputs[order][:, order]).links
    done = 0
    for count in (1, 5, 32, 58):
        errors = (matrix - coded)[order][:done]
        target = rows.target(count)
        # Rows that become just that leave nothing of what those before have left undone.
        whole = torch.cat([errors, matrix[order][done : done + count] - target])
        left = (links[: done + count, : done + count].T @ whole)[done:]
        torch.testing.assert_close(left, torch.zeros(count, COLUMNS), atol=1e-4, rtol=0)
        torch.testing.assert_close(rows.coming(count), matrix[order][done : done + count])
        coded[order[done : done + count]] = target.round()
        rows.add(target.round())
        done += count


def test_rows_left_out_are_made_good_for_too(matrix: Tensor, outputs: Tensor) -> None:
    rows = RowFeedback(Whole(outputs), torch.arange(ROWS), matrix, torch.zeros(ROWS))
    rows.leave_out(40)
    links = upper_links(outputs).links
    whole = torch.cat([matrix[:40], matrix[40:] - rows.target(56)])
    torch.testing.assert_close((links.T @ whole)[40:], torch.zeros(56, COLUMNS), atol=1e-4, rtol=0)


@every_coder
def test_less_is_lost_than_row_by_row(
    coder: Coder, bits: int, share: float, matrix: Tensor, outputs: Tensor, feedback: Feedback
) -> None:
    inputs = second_moment(COLUMNS, 30)
    [(codes, scales)] = coded_for_outputs([started(coder, bits, matrix)], coder, feedback)
    alone = lost(matrix - coder.decoded(codes, scales, bits), outputs, inputs)
    together = lost(matrix - in_turn(coder, bits, matrix, feedback, outputs), outputs, inputs)
    assert together < share * alone


@every_coder
def test_rows_that_do_not_count_together_lose_as_much(
    coder: Coder, bits: int, share: float, matrix: Tensor, feedback: Feedback
) -> None:
    del share
    [(codes, scales)] = coded_for_outputs([started(coder, bits, matrix)], coder, feedback)
    alone = feedback.output_errors(matrix - coder.decoded(codes, scales, bits)).sum()
    turned = feedback.output_errors(matrix - in_turn(coder, bits, matrix, feedback, torch.eye(ROWS))).sum()
    assert turned == pytest.approx(float(alone), rel=0.12)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_chunks_of_rows_go_on_one_path(
    bits: int, matrix: Tensor, outputs: Tensor, feedback: Feedback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is decoded as a whole is what the rows were told that they became, or they could not make good for it."""
    inputs, coder = second_moment(COLUMNS, 30), trellis.TrellisCodes()
    whole = lost(matrix - in_turn(coder, bits, matrix, feedback, outputs), outputs, inputs)
    monkeypatch.setattr(row_feedback, "LINKED_ROWS", 40)
    cut = lost(matrix - in_turn(coder, bits, matrix, feedback, outputs), outputs, inputs)
    [(codes, scales)] = coded_for_outputs([started(coder, bits, matrix)], coder, feedback)
    alone = lost(matrix - coder.decoded(codes, scales, bits), outputs, inputs)
    assert whole < alone
    assert cut < alone


def test_blocks_end_with_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_feedback, "LINKED_ROWS", 40)
    rows = RowFeedback(Whole(torch.eye(100)), torch.arange(100), torch.zeros(100, 4), torch.zeros(100))
    assert rows.blocks(100, 16) == [16, 16, 8, 16, 16, 8, 16, 4]
    rows.add(rows.target(16))
    assert rows.blocks(50, 32) == [24, 26]
    assert rows_together(96, 16) == 16
    assert rows_together(14336, 16) == 224


def test_a_moment_that_is_not_positive_definite_is_an_error() -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        upper_links(-torch.eye(3))
