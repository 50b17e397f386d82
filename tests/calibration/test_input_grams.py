"""Second moments by expert, in both ways of keeping those of down."""

import pytest
import torch
from draws import normal64
from torch import Tensor

from moetool.architectures import MoEShape
from moetool.calibration import input_grams
from moetool.calibration.held_experts import ExpertRun
from moetool.calibration.input_grams import InputGramCollector
from moetool.numerics.halved_gram import shrunk
from moetool.numerics.shrinkage import shrink

SHAPE = MoEShape(experts=3, top_k=1, hidden=6, intermediate=8)
TOKENS = (40, 3, 0)


def windows_of(count: int) -> Tensor:
    """Tokens of four windows."""
    return torch.arange(count) * 4 // max(count, 1)


def collected() -> tuple[InputGramCollector, list[Tensor], list[Tensor]]:
    collector = InputGramCollector(SHAPE, torch.device("cpu"))
    inputs = [normal64(count, 6, seed=10 + expert) for expert, count in enumerate(TOKENS)]
    activations = [normal64(count, 8, seed=20 + expert) * (1 + expert) for expert, count in enumerate(TOKENS)]
    for expert, count in enumerate(TOKENS):
        windows, nothing = windows_of(count), torch.zeros(count, 16)
        for part in (slice(0, count // 2), slice(count // 2, count)):
            work = ExpertRun(nothing, activations[expert][part], nothing, nothing, torch.relu)
            collector.observe(expert, windows[part], inputs[expert][part], work)
    return collector, inputs, activations


@pytest.mark.parametrize("role", ["gate", "up", "down"])
def test_each_experts_own_moments_shrunk_as_far_as_halves_disagree(role: str) -> None:
    """And to the layer's where there are few tokens."""
    collector, inputs, activations = collected()
    given = activations if role == "down" else inputs
    width = given[0].shape[1]
    mean = sum((own.T @ own for own in given), torch.zeros(width, width).double()) / sum(TOKENS)
    for expert, own in enumerate(given):
        second = own[[bool(window in (1, 2)) for window in windows_of(len(own))]]
        expected = shrink(shrunk(own.T @ own, second.T @ second), len(own), mean, 0.25 * width)
        torch.testing.assert_close(collector.gram(expert, role), expected.float())  # type: ignore[arg-type]


def test_energy_is_the_trace() -> None:
    collector, inputs, activations = collected()
    expected = [[own.square().sum().item() for own in given] for given in (inputs, inputs, activations)]
    torch.testing.assert_close(collector.energy(), torch.tensor(expected, dtype=torch.float64))
    assert collector.tokens().tolist() == list(TOKENS)


def test_wide_experts_share_one_matrix_scaled_by_their_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_grams, "_EACH_DOWN_BYTES", 1)
    collector, _, activations = collected()
    assert not collector.each_down
    whole = sum((own.T @ own for own in activations), torch.zeros(8, 8).double()).float()
    for expert, own in enumerate(activations):
        gram = collector.gram(expert, "down")
        mean = whole.diagonal() / sum(TOKENS)
        diagonal = (own.square().sum(0) + 2 * mean) / (len(own) + 2) * max(len(own), 1)
        torch.testing.assert_close(gram.diagonal(), diagonal.float())
        correlation = gram / (gram.diagonal().sqrt()[:, None] * gram.diagonal().sqrt())
        expected = whole / (whole.diagonal().sqrt()[:, None] * whole.diagonal().sqrt())
        torch.testing.assert_close(correlation, expected)
