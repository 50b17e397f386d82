"""Paths through the trellis are the nearest there are, compiled or not, and what is decoded is what they go through."""

from itertools import product

import pytest
import torch
from torch import Tensor

from moetool.compiled import compiler
from moetool.numerics import trellis
from moetool.numerics.error_feedback import Coded, Feedback
from moetool.numerics.row_feedback import Among

CPU = torch.device("cpu")
# Squared errors that a normal variable is left with, and those of the best levels (J. Max, 1960).
LEFT = {1: (0.280, 0.3634), 2: (0.077, 0.1175), 3: (0.021, 0.03454), 4: (0.0058, 0.009497)}
every_width = pytest.mark.parametrize("bits", trellis.WIDTHS)


def found(numbers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(numbers.shape, dtype=torch.uint8)
    return trellis.path(numbers, bits, codes), codes


def encoded(
    matrix: Tensor, bits: int, group: int, dtype: torch.dtype = torch.float32, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scales = trellis.fitting_scales(matrix, bits, group, dtype, importance=importance)
    return trellis.nearest_codes(matrix, scales, bits), scales


@every_width
def test_no_path_is_nearer(bits: int) -> None:
    count = {1: 10, 2: 5, 3: 4, 4: 3}[bits]
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(bits))
    own, codes = found(numbers, bits)
    every = torch.tensor(list(product(range(2**bits), repeat=count)), dtype=torch.uint8).T
    values = trellis.values(bits, CPU)[trellis.windows(every, bits)]
    least = (values - numbers[:, None]).square().sum(0).min()
    torch.testing.assert_close((own - numbers).square().sum(), least)
    assert trellis.values(bits, CPU)[trellis.windows(codes, bits)].equal(own)


@every_width
@pytest.mark.parametrize("count", [1, 7, 1024, 2500])
def test_compiled_and_plain_are_equal(bits: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for sums that are rounded otherwise, where one segment ends and the next begins, too; and so are lines
    together and alone."""
    numbers = torch.randn(2, count, generator=torch.Generator().manual_seed(count))
    values, codes = found(numbers, bits)
    assert values.equal(trellis.values(bits, CPU)[trellis.windows(codes.T, bits)].T)
    assert found(numbers[1].contiguous(), bits)[1].equal(codes[1])
    monkeypatch.setattr(compiler, "problem", lambda: "not here")
    plain, other = found(numbers, bits)
    assert (other != codes).float().mean() < 0.02
    assert float((plain - numbers).square().sum()) == pytest.approx(float((values - numbers).square().sum()), rel=1e-4)


@every_width
def test_what_is_left_of_normal_numbers(bits: int) -> None:
    numbers = torch.randn(1 << 15, generator=torch.Generator().manual_seed(0))
    left, of_levels = LEFT[bits]
    assert float((found(numbers, bits)[0] - numbers).square().mean()) == pytest.approx(left, rel=0.04)
    assert left < 0.8 * of_levels


@every_width
def test_segments_cost_next_to_nothing(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.randn(1 << 14, generator=torch.Generator().manual_seed(1))
    cut = (found(numbers, bits)[0] - numbers).square().sum()
    monkeypatch.setattr(trellis, "_SEGMENT", len(numbers))
    whole = (found(numbers, bits)[0] - numbers).square().sum()
    assert whole <= cut < 1.01 * whole


@every_width
def test_any_number_of_threads(bits: int, request: pytest.FixtureRequest) -> None:
    matrix = torch.randn(40, 32, generator=torch.Generator().manual_seed(2))
    expected = encoded(matrix, bits, 8)
    request.getfixturevalue("two_threads")
    codes, scales = encoded(matrix, bits, 8)
    assert codes.equal(expected[0])
    assert scales.equal(expected[1])


@every_width
def test_feedback_makes_outputs_better(bits: int) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(400, 48, generator=generator) @ torch.randn(48, 48, generator=generator)
    matrix, gram = torch.randn(64, 48, generator=generator), inputs.T @ inputs
    feedback = Feedback.of(gram)
    assert feedback is not None

    def lost(codes: Tensor, scales: Tensor) -> float:
        return float(feedback.output_errors(trellis.decoded(codes, scales, bits, torch.float32) - matrix).sum())

    scales = trellis.fitting_scales(matrix, bits, 16, torch.float32, importance=gram.diagonal())
    [fed] = trellis.TrellisCodes().fed_back([Coded(matrix, scales, bits)], feedback)
    assert lost(fed, scales) < 0.9 * lost(*encoded(matrix, bits, 16))


def test_extremes() -> None:
    """Rows of zeros stay zeros; inputs that count nothing do no harm; no column, no row."""
    matrix = torch.randn(16, 24, generator=torch.Generator().manual_seed(4))
    matrix[3] = 0
    matrix[4] *= 1e30
    matrix[5] *= 1e-30
    codes, scales = encoded(matrix, 2, 8, torch.bfloat16, importance=torch.zeros(24))
    decoded = trellis.decoded(codes, scales, 2, torch.float32)
    assert not decoded[3].any()
    assert decoded.isfinite().all()
    alike = torch.randn(16, 24, generator=torch.Generator().manual_seed(7)).index_copy(
        0, torch.tensor([4, 5]), matrix[4:6]
    )
    errors = (trellis.decoded(*encoded(alike, 2, 8), 2, torch.float32) - alike).double()
    assert (errors.square().sum(1) < 0.3 * alike.double().square().sum(1)).all()


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="multiple of 8 rows, not 12"):
        encoded(torch.ones(12, 8), 3, 8)
    with pytest.raises(ValueError, match="not finite"):
        encoded(torch.full((8, 8), torch.nan), 2, 8)
    with pytest.raises(ValueError, match="1, 2, 3, 4 bits, not 8"):
        trellis.values(8, CPU)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("bits", "count"), [(1, 14), (2, 8), (3, 5), (4, 4)])
def test_linked_paths_lose_least(bits: int, count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to nothing more than the best of all paths where errors move the numbers behind them, compiled or not."""
    generator = torch.Generator().manual_seed(seed)
    links = torch.eye(count) + torch.randn(count, count, generator=generator).triu(1)
    pivots = torch.rand(count, generator=generator) + 0.1
    scales, numbers = torch.rand(count, generator=generator) + 0.5, torch.randn(count, generator=generator)

    def lost(own: Tensor) -> Tensor:
        errors = (numbers[:, None] - own) * scales[:, None]
        return pivots @ (links.T @ errors).square()

    codes = torch.empty(count, dtype=torch.uint8)
    own = trellis.linked_path(numbers, bits, codes, 0, Among(links, pivots), scales)
    assert trellis.values(bits, CPU)[trellis.windows(codes, bits)].equal(own)
    every = torch.tensor(list(product(range(2**bits), repeat=count)), dtype=torch.uint8).T
    least = lost(trellis.values(bits, CPU)[trellis.windows(every, bits)]).min()
    assert float(lost(own[:, None])) <= 1.02 * float(least)
    monkeypatch.setattr(compiler, "problem", lambda: "not here")
    plain = trellis.linked_path(numbers, bits, torch.empty_like(codes), 0, Among(links, pivots), scales)
    torch.testing.assert_close(lost(plain[:, None]), lost(own[:, None]), rtol=1e-4, atol=1e-6)


@every_width
def test_linked_paths_are_paths_where_nothing_is_linked(bits: int) -> None:
    numbers = torch.randn(60, generator=torch.Generator().manual_seed(5))
    codes = torch.empty(60, dtype=torch.uint8)
    own = trellis.linked_path(numbers, bits, codes, 0, Among(torch.eye(60), torch.ones(60)), torch.ones(60))
    assert float((own - numbers).square().sum()) == pytest.approx(
        float((found(numbers, bits)[0] - numbers).square().sum()), rel=1e-5
    )


@every_width
def test_paths_go_on_where_others_ended(bits: int) -> None:
    numbers = torch.randn(40, generator=torch.Generator().manual_seed(6))
    codes = torch.empty(40, dtype=torch.uint8)
    trellis.path(numbers[:16].contiguous(), bits, codes[:16])
    after = trellis.TrellisCodes().after([codes[:16, None]], Among(torch.eye(24), torch.ones(24)))
    feedback = Feedback.of(torch.ones(1, 1))
    assert feedback is not None
    part = Coded(numbers[16:, None], torch.ones(24, 1), bits)
    [own] = after.fed_back([part], feedback)
    codes[16:] = own[:, 0]
    values = trellis.values(bits, CPU)[trellis.windows(codes, bits)]
    torch.testing.assert_close(after.decoded(own, part.scales, bits)[:, 0], values[16:])
    assert float((values[16:] - numbers[16:]).square().mean()) < 2 * LEFT[bits][1]
