"""What an error costs in loss, by the formulas and by what they are for."""

import math

import pytest
import torch
from torch import Tensor

from moetool.architectures import ROLES
from moetool.calibration.collectors import LayerStatistics
from moetool.methods.choices import Sensitivity
from moetool.methods.sensitivity import LayerSensitivity

E, OUT, IN = 3, 4, 10
PRIOR = 32  # tokens


def statistics(tokens: list[int], rows: Tensor | None = None) -> LayerStatistics:
    own = torch.tensor([[1.0, 2, 3, 4], [8, 0, 0, 0], [0, 0, 0, 0]]) if rows is None else rows
    return LayerStatistics(torch.tensor(tokens), dict.fromkeys(ROLES, own), torch.ones(IN, dtype=torch.float64))


TOKENS = [30, 10, 0]
ENERGY = torch.tensor([[60.0, 20, 0]] * 2 + [[600.0, 200, 0]], dtype=torch.float64)


def made(choice: Sensitivity, measured: LayerStatistics | None = None, energy: Tensor = ENERGY) -> LayerSensitivity:
    return LayerSensitivity(choice, measured or statistics(TOKENS), energy)


def channels(expert: int, energy: list[float], rows: Tensor) -> Tensor:
    """Mean squared gradient per output channel, with a prior of 32 average tokens of the layer."""
    total = sum(energy)
    prior = PRIOR * total / sum(TOKENS)
    return (rows[expert].double() + prior * rows.double().sum(0) / total) / (energy[expert] + prior)


def test_by_channel() -> None:
    rows = statistics(TOKENS).fisher["up"]
    for role, energy in (("up", [60.0, 20, 0]), ("down", [600.0, 200, 0])):
        found = made("channel").of(role, 0, IN, whitened=True)
        expected = channels(0, energy, rows)
        assert found.weight == 1.0
        assert found.row_scale is not None
        torch.testing.assert_close(found.row_scale.double().square(), expected, rtol=1e-6, atol=0)


def test_by_matrix_is_the_sum_of_the_channels() -> None:
    rows = statistics(TOKENS).fisher["up"]
    for expert in (0, 1):
        found = made("matrix").of("up", expert, IN, whitened=True)
        assert found.row_scale is None
        assert found.weight == pytest.approx(float(channels(expert, [60.0, 20, 0], rows).sum()), rel=1e-12)


def test_a_silent_channel_keeps_a_thousandth_of_the_mean() -> None:
    rows = torch.tensor([[1e6, 0, 0, 0]] * 3)
    found = made("channel", statistics(TOKENS, rows)).of("up", 0, IN, whitened=True)
    assert found.row_scale is not None
    square = found.row_scale.double().square()
    mean = float(channels(0, [60.0, 20, 0], rows).mean())
    torch.testing.assert_close(square[1:], torch.full((3,), 1e-3 * mean, dtype=torch.float64), rtol=1e-6, atol=0)
    assert float(square[0]) == pytest.approx(4 * mean, rel=1e-6)


def test_a_plain_spectrum_is_scaled_by_the_energy_of_the_inputs() -> None:
    """Then errors are predicted as if the inputs were white: `‖E‖² · (energy of the inputs) / in`."""
    rows = statistics(TOKENS).fisher["up"]
    assert made("none").of("up", 0, IN, whitened=False).weight == 60 / IN
    assert made("none").of("up", 0, IN, whitened=True).weight == 1.0
    for choice in ("channel", "matrix"):
        found = made(choice).of("up", 0, IN, whitened=False)
        assert found.row_scale is None
        assert found.weight == pytest.approx(60 / IN * float(channels(0, [60.0, 20, 0], rows).sum()), rel=1e-12)


@pytest.mark.parametrize("whitened", [True, False])
@pytest.mark.parametrize("choice", ["channel", "matrix", "none"])
def test_an_unreached_expert_counts_as_one_average_token(choice: Sensitivity, whitened: bool) -> None:
    found = made(choice).of("up", 2, IN, whitened=whitened)
    per_token = 80 / 40
    layer = 1.0 if choice == "none" else float(statistics(TOKENS).fisher["up"].double().sum()) / 80
    assert found.row_scale is None
    assert found.weight == pytest.approx(per_token / IN * layer, rel=1e-12)


@pytest.mark.parametrize("choice", ["channel", "matrix"])
def test_without_fisher_all_errors_count_the_same(choice: Sensitivity) -> None:
    flat = statistics(TOKENS, torch.zeros(E, OUT))
    for measured in (flat, None):
        found = LayerSensitivity(choice, measured, ENERGY).of("up", 0, IN, whitened=True)
        assert (found.row_scale, found.weight) == (None, 1.0)


def test_nothing_measured_at_all() -> None:
    found = LayerSensitivity("channel", None, torch.zeros(3, E)).of("up", 0, IN, whitened=False)
    assert (found.row_scale, found.weight) == (None, 1.0)


def test_many_tokens_outweigh_the_prior_and_few_do_not() -> None:
    rows = torch.tensor([[8.0, 8, 8, 8], [0, 0, 0, 1], [0, 0, 0, 0]])

    def of(share: float) -> Tensor:
        energy = torch.tensor([[1e6, 1e6 * share, 0]] * 3, dtype=torch.float64)
        measured = statistics([1_000_000, round(1e6 * share), 0], torch.stack([rows[0], rows[1] * share, rows[2]]))
        scale = made("channel", measured, energy).of("up", 1, IN, whitened=True).row_scale
        assert scale is not None
        return scale.double().square() * 1e6

    torch.testing.assert_close(of(1.0), torch.tensor([1e-3 / 4, 1e-3 / 4, 1e-3 / 4, 1]).double(), rtol=0.5, atol=1e-3)
    torch.testing.assert_close(of(1e-6), torch.full((OUT,), 8.0).double(), rtol=0.05, atol=0)


def test_it_is_the_cost_of_an_error() -> None:
    """Windows of one token, loss = Σ c_j y_j² / 2: an error e_j costs E[(∂L/∂y_j)²] e_j², and that is what comes out.

    Inputs of one length, so that gradients and inputs are independent as the formula assumes.
    """
    generator = torch.Generator().manual_seed(0)
    windows = 5000
    x = torch.randn(windows, IN, generator=generator, dtype=torch.float64)
    x = 3 * x / x.norm(dim=1, keepdim=True)
    gradient = torch.randn(windows, OUT, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 2, 0.5, 3])
    rows = (gradient[:, :, None] * x[:, None, :]).square().sum(2).mean(0).float()
    energy = torch.full((3, 1), float(x.square().sum()), dtype=torch.float64)
    measured = LayerStatistics(torch.tensor([windows]), dict.fromkeys(ROLES, rows[None]), torch.ones(IN))
    found = LayerSensitivity("channel", measured, energy).of("up", 0, IN, whitened=True)
    assert found.row_scale is not None
    # Spectra are sums over tokens, the Fisher information is a mean over windows: hence the division.
    expected = gradient.square().mean(0) / windows
    torch.testing.assert_close(found.row_scale.double().square(), expected, rtol=1e-5, atol=0)
    assert math.isclose(found.weight, 1.0)
