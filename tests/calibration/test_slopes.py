"""Slopes of activations: exact, and of tokens that lie evenly among an expert's."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.calibration.held_experts import ExpertRun
from moetool.calibration.peers import Peers
from moetool.calibration.slopes import MOST_SLOPES, SlopeSamples

WIDTH = 3


def activate(values: Tensor) -> Tensor:
    gate, up = values.chunk(2, -1)
    return F.silu(gate) * up


def work(rows: Tensor) -> ExpertRun:
    return ExpertRun(rows, activate(rows), rows, rows, activate)


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 2 * WIDTH, generator=torch.Generator().manual_seed(seed))


def collected(parts: list[Tensor], before: int = 0) -> SlopeSamples:
    samples, position = SlopeSamples(before), 0
    samples.hold(range(1))
    for part in parts:
        samples.at(position)
        samples.observe(0, work(part))
        position += len(part)
    return samples


def test_slopes_are_the_derivatives_of_every_neuron() -> None:
    given = rows(5).double()
    found = collected([given]).of(0)
    assert found is not None
    exact = torch.stack([torch.autograd.functional.jacobian(activate, row) for row in given])  # [tokens, out, in]
    expected = torch.cat([own.diagonal(dim1=1, dim2=2) for own in exact.split(WIDTH, 2)], 1)
    torch.testing.assert_close(found.sort(0).values, expected.float().sort(0).values)


@pytest.mark.parametrize("count", [1, MOST_SLOPES, MOST_SLOPES + 1, 5 * MOST_SLOPES])
@pytest.mark.parametrize("cut", [1, 7])
def test_tokens_are_the_same_however_they_come(count: int, cut: int) -> None:
    given = rows(count)
    found, expected = collected(list(given.chunk(cut))).of(0), collected([given]).of(0)
    assert found is not None
    assert expected is not None
    assert found.equal(expected)
    assert len(found) == min(count, MOST_SLOPES)


def test_tokens_lie_evenly() -> None:
    """Of any stretch about its share is kept."""
    count = 20 * MOST_SLOPES
    given = torch.zeros(count, 2 * WIDTH)
    given[:, WIDTH:] = torch.arange(count)[:, None]  # of which the derivative by gate is a half, at zero
    found = collected(list(given.chunk(9))).of(0)
    assert found is not None
    places = (2 * found[:, 0]).long()
    assert len(places.unique()) == MOST_SLOPES
    parts = torch.bincount(places // (count // 16), minlength=16)
    assert int((parts - MOST_SLOPES // 16).abs().max()) <= 2


def test_experts_that_are_not_held_or_not_reached() -> None:
    samples = collected([])
    samples.observe(1, work(rows(4)))
    assert samples.of(0) is None
    with pytest.raises(KeyError):
        samples.of(1)


class _Two(Peers):
    """Two processes, of which this is one, and what the other says."""

    size = 2

    def __init__(self, other: SlopeSamples) -> None:
        self._other = other

    def gather(self, said):  # type: ignore[no-untyped-def]
        return [said, self._other._kept]


def test_samples_of_several_processes_are_those_of_one() -> None:
    given = rows(3 * MOST_SLOPES)
    alone = collected([given]).of(0)
    first, second = (collected([part], before) for part, before in ((given[:700], 0), (given[700:], 700)))
    first.reduce(lambda expert: 0, _Two(second))
    both = first.of(0)
    assert alone is not None
    assert both is not None
    assert both.equal(alone)
    first.reduce(lambda expert: 1, _Two(second))
    assert first.of(0) is None
