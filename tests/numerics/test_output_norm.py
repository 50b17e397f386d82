"""Norms of errors at outputs: against R and H written out."""

import pytest
import torch
from draws import normal
from torch import Tensor

from moetool.numerics import output_norm
from moetool.numerics.factorize import factorize, truncate
from moetool.numerics.output_norm import ChannelNorm, LinkedNorm, OutputNorm

ROWS, COLUMNS, BLOCK = 24, 16, 10
CPU = torch.device("cpu")


class Moment:
    """A metric of rows by a whole second moment."""

    def __init__(self, rows: int) -> None:
        root = normal(rows, rows, seed=1) + 3 * torch.eye(rows)
        self.whole = root.T @ root

    def among(self, rows: Tensor) -> Tensor:
        return self.whole[rows][:, rows].clone()


@pytest.fixture
def moment() -> Moment:
    return Moment(ROWS)


def in_blocks(moment: Moment) -> Tensor:
    """The second moment without what links rows of different blocks."""
    block = torch.arange(ROWS) // BLOCK
    return torch.where(block[:, None] == block, moment.whole, 0.0)


@pytest.fixture(params=["channels", "linked", "blocks"])
def norm(request: pytest.FixtureRequest, moment: Moment, monkeypatch: pytest.MonkeyPatch) -> tuple[OutputNorm, Tensor]:
    """A norm, and the second moment [out, out] that it stands for."""
    if request.param == "channels":
        scale = 0.1 + normal(ROWS, seed=2).abs()
        return ChannelNorm(scale), torch.diag(scale.square())
    if request.param == "blocks":
        monkeypatch.setattr(output_norm, "LINKED_ROWS", BLOCK)
    expected = in_blocks(moment) if request.param == "blocks" else moment.whole
    return LinkedNorm.of(moment, ROWS, CPU), expected


def test_errors_count_by_the_second_moment(norm: tuple[OutputNorm, Tensor]) -> None:
    own, moment = norm
    error = normal(ROWS, COLUMNS, seed=3)
    counted = own.times(error).square().sum()
    torch.testing.assert_close(counted, (error.T @ moment @ error).trace(), rtol=1e-5, atol=0)
    torch.testing.assert_close(own.counts(), moment.diagonal(), rtol=1e-5, atol=0)


def test_undone(norm: tuple[OutputNorm, Tensor]) -> None:
    matrix = normal(ROWS, COLUMNS, seed=3)
    for own in (norm[0], norm[0].relative()):
        torch.testing.assert_close(own.undone(own.times(matrix)), matrix, rtol=1e-4, atol=1e-5)


def test_relative_to_its_largest(norm: tuple[OutputNorm, Tensor]) -> None:
    matrix = normal(ROWS, COLUMNS, seed=3)
    relative, whole = norm[0].relative(), norm[0].times(torch.eye(ROWS))
    torch.testing.assert_close(relative.times(matrix) * whole.diagonal().amax(), norm[0].times(matrix))


def test_no_channel_counts() -> None:
    """As for an expert that has no part in the loss: all channels count alike."""
    assert ChannelNorm(torch.zeros(4)).relative().scale.tolist() == [1.0] * 4
    assert ChannelNorm.of(None) is None


def test_like_another(moment: Moment) -> None:
    """Together all outputs count as much, and to each other as they did."""
    channels, linked = ChannelNorm(torch.linspace(0.1, 2, ROWS)), LinkedNorm.of(moment, ROWS, CPU)
    found = linked.like(channels).counts()
    assert float(found.sum()) == pytest.approx(float(channels.counts().sum()), rel=1e-5)
    torch.testing.assert_close(found / found.sum(), linked.counts() / linked.counts().sum())


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_factors_are_best_in_the_norm(norm: tuple[OutputNorm, Tensor], rank: int) -> None:
    """Beside the least that is possible, by singular values; those that are best in the plain norm lose more."""
    own, moment = norm
    delta = normal(ROWS, COLUMNS, seed=4)
    given = normal(80, COLUMNS, seed=5).double()
    gram = given.T @ given
    root, inner = torch.linalg.cholesky(gram), torch.linalg.cholesky(moment.double()).T
    best = torch.linalg.svdvals(inner @ delta.double() @ root).square()[rank:].sum()

    def lost(norm: OutputNorm | None) -> float:
        scaled = delta if norm is None else norm.times(delta)
        u, v = truncate(delta, factorize(scaled, gram=gram), rank, torch.float64, norm=norm)
        return float((inner @ (delta.double() - u @ v) @ root).square().sum())

    assert lost(own) == pytest.approx(float(best), rel=1e-4)
    assert lost(None) > 1.01 * float(best)
