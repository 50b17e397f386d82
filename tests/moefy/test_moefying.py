"""Representative values of moefied networks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moetool.moefy.selector import TrainedSelector
from moetool.moefy.settling import mean_where_left_out
from moetool.moefy.statistics import CHUNK

TOKENS, HIDDEN, EXPERTS, SIZE = CHUNK + 100, 6, 4, 3


class Sampled:
    """What `SampledNetwork` gives of a text."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(TOKENS, HIDDEN)
        self.values = torch.randn(TOKENS, EXPERTS * SIZE) + torch.arange(EXPERTS * SIZE)

    def activations(self) -> Iterator[Tensor]:
        yield from self.values.split(CHUNK)


def found(second: Tensor, chosen: int) -> tuple[Any, ...]:
    sampled, order = Sampled(), torch.randperm(EXPERTS * SIZE)
    selector = TrainedSelector(torch.randn(EXPERTS, HIDDEN), second, 0.0, 0.0, 0.0)
    activations = sampled.values[:, order]
    mean = activations.mean(0)
    centre = mean_where_left_out(sampled, order, selector, chosen, mean)  # type: ignore[arg-type]
    left_out = selector.left_out(sampled.inputs, chosen).repeat_interleave(SIZE, 1)
    return centre, activations, left_out, mean


def test_they_are_means_over_the_tokens_that_leave_a_neuron_out() -> None:
    centre, activations, left_out, mean = found(torch.eye(EXPERTS), 2)
    for neuron in range(EXPERTS * SIZE):
        expected = activations[left_out[:, neuron], neuron].mean()
        torch.testing.assert_close(centre[neuron], expected)
    assert not torch.allclose(centre, mean, atol=1e-3)


def test_the_mean_activation_stays_what_it_was() -> None:
    centre, activations, left_out, mean = found(torch.eye(EXPERTS), 3)
    torch.testing.assert_close(torch.where(left_out, centre, activations).mean(0), mean)


def test_no_other_constants_lose_less() -> None:
    centre, activations, left_out, mean = found(torch.eye(EXPERTS), 1)

    def lost(constants: Tensor) -> float:
        return ((activations - constants).square() * left_out).sum().item()

    assert lost(centre) < lost(mean)
    assert all(lost(centre) < lost(centre + 0.01 * torch.randn_like(centre)) for _ in range(5))


def test_neurons_that_are_never_left_out_keep_their_mean() -> None:
    centre, _, left_out, mean = found(torch.eye(EXPERTS), EXPERTS)
    assert not left_out.any()
    torch.testing.assert_close(centre, mean)
