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


def collected(parts: list[Tensor]) -> SlopeSamples:
    samples = SlopeSamples()
    samples.hold(range(1))
    for part in parts:
        samples.observe(0, work(part))
    return samples


def test_slopes_are_the_derivatives_of_every_neuron() -> None:
    given = rows(5).double()
    found = collected([given]).of(0)
    assert found is not None
    exact = torch.stack([torch.autograd.functional.jacobian(activate, row) for row in given])  # [tokens, out, in]
    expected = torch.cat([own.diagonal(dim1=1, dim2=2) for own in exact.split(WIDTH, 2)], 1)
    torch.testing.assert_close(found, expected.float())


@pytest.mark.parametrize("count", [1, MOST_SLOPES, MOST_SLOPES + 1, 5 * MOST_SLOPES])
@pytest.mark.parametrize("cut", [1, 7])
def test_tokens_lie_evenly_however_they_come(count: int, cut: int) -> None:
    given = rows(count)
    found = collected(list(given.chunk(cut))).of(0)
    assert found is not None
    step = next(2**power for power in range(9) if -(-count // 2**power) <= MOST_SLOPES)
    expected = collected([given[::step]]).of(0)
    assert expected is not None
    assert found.equal(expected)


def test_experts_that_are_not_held_or_not_reached() -> None:
    samples = collected([])
    samples.observe(1, work(rows(4)))
    assert samples.of(0) is None
    with pytest.raises(KeyError):
        samples.of(1)


class _Two(Peers):
    """Two processes that have seen as much, of which this is one."""

    size = 2

    def gather(self, said):  # type: ignore[no-untyped-def]
        return [said, said]


def test_samples_of_several_processes_meet_at_the_owner() -> None:
    samples = collected([rows(4)])
    own = samples.of(0)
    assert own is not None
    samples.reduce(lambda expert: 0, _Two())
    both = samples.of(0)
    assert both is not None
    assert both.equal(torch.cat([own, own]))
    samples.reduce(lambda expert: 1, _Two())
    assert samples.of(0) is None
