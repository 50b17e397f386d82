"""What forms would lose, told from a few rows: close to what they do lose once they are made."""

import pytest
import torch
from sampling import sampled
from torch import Tensor

from moetool.compress.factors.sensitivity import MatrixSensitivity
from moetool.compress.mixing.loss_estimates import losses, prepared
from moetool.numerics.output_norm import ChannelNorm
from moetool.representations import Measured, Representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank
from moetool.representations.mixed_rows import MixedRows
from moetool.representations.quantized import Quantized
from moetool.representations.quantized_low_rank import QuantizedLowRank

FORMS: list[Representation] = [
    LowRank(0),
    *(Quantized(bits, 64) for bits in (1, 2, 3, 4)),
    *(QuantizedLowRank(rank, 3, 64) for rank in (8, 16, 32)),
    Dense(),
]
MIXTURES: list[Representation] = [MixedRows(shares, 64) for shares in ((4, 6, 6), (0, 2, 8, 6), (10, 0, 3, 3))]


def delta_of(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, 24, generator=generator) for size in (rows, columns))
    size = 1 + torch.rand(rows, 1, generator=generator)
    return 0.01 * size * (torch.randn(rows, columns, generator=generator) + left @ right.T / 4)


def gram_of(inputs: int) -> Tensor:
    """Of correlated inputs, some of them large."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(2 * inputs, inputs // 4, generator=generator) @ torch.randn(
        inputs // 4, inputs, generator=generator
    ) + torch.randn(2 * inputs, inputs, generator=generator)
    tokens *= torch.logspace(-1, 1, inputs)[torch.randperm(inputs, generator=generator)]
    return tokens.double().T @ tokens.double()


def made(delta: Tensor, form: Representation, measured: Measured, counts: MatrixSensitivity) -> float:
    """What a form loses, by the definition."""
    if form.is_whole:
        return 0.0
    assert measured.gram is not None
    encoded = form.encode(delta, torch.bfloat16, measured)
    error = form.decode(encoded, (delta.shape[0], delta.shape[1]), torch.bfloat16).double() - delta
    rows = ((error @ measured.gram) * error).sum(1)
    scale = 1.0 if counts.row_scale is None else counts.row_scale.double().square()
    return counts.weight * float((rows * scale).sum())


@pytest.mark.parametrize(
    ("rows", "columns", "within", "weighs_rows"),
    sampled(
        ((*shape, weighs) for shape in ((640, 128, 0.1), (128, 640, 1e-3)) for weighs in (False, True)),
        [(640, 128, 0.1, True), (128, 640, 1e-3, False)],
    ),
)
def test_close_to_what_is_lost(rows: int, columns: int, within: float, weighs_rows: bool) -> None:
    delta = delta_of(rows, columns)
    row_scale = 0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(1)) if weighs_rows else None
    counts = MatrixSensitivity(row_scale, 3.0)
    measured = prepared(delta, FORMS, Measured(gram_of(columns), norm=ChannelNorm.of(row_scale)).with_feedback())
    for forms, near in ((FORMS, within), (MIXTURES, 0.1)):  # of mixtures rows are taken as those of other mixtures
        told = losses(delta, forms, torch.bfloat16, measured, counts)
        assert told == pytest.approx([made(delta, form, measured, counts) for form in forms], rel=near)


def test_codes_alone_need_no_directions() -> None:
    delta, measured = delta_of(320, 64), Measured(gram_of(64)).with_feedback()
    assert prepared(delta, FORMS[:3], measured) is measured
    assert all(loss > 0 for loss in losses(delta, FORMS[:3], torch.bfloat16, measured, MatrixSensitivity(None, 1.0)))


@pytest.mark.parametrize("rank", [0, 2])
def test_deltas_without_full_rank(rank: int) -> None:
    """What 8 directions lose of a matrix of 2, or of none, is next to nothing."""
    generator = torch.Generator().manual_seed(2)
    delta = torch.randn(320, rank, generator=generator) @ torch.randn(rank, 64, generator=generator)
    forms = [LowRank(0), QuantizedLowRank(8, 8, 64)]
    measured = prepared(delta, forms, Measured(gram_of(64)).with_feedback())
    whole, left = losses(delta, forms, torch.float32, measured, MatrixSensitivity(None, 1.0))
    assert left <= 1e-3 * whole


def test_silent_inputs_lose_nothing() -> None:
    delta = delta_of(320, 64)
    measured = prepared(delta, FORMS, Measured(torch.zeros(64, 64, dtype=torch.float64)).with_feedback())
    assert losses(delta, FORMS, torch.bfloat16, measured, MatrixSensitivity(None, 1.0)) == [0.0] * len(FORMS)
