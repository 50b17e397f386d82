"""What an error costs in loss, by the formulas and by what they are for."""

import math

import pytest
import torch
from torch import Tensor

from moetool.architectures import ROLES, Role
from moetool.calibration.collectors import LayerStatistics
from moetool.compress.factors.sensitivity import LayerSensitivity, MatrixSensitivity, Sensitivity
from moetool.compress.factors.svd import SharedFactor

E, OUT, IN = 3, 4, 10
PRIOR = 32  # tokens


def statistics(tokens: list[int], rows: Tensor | None = None) -> LayerStatistics:
    own = torch.tensor([[1.0, 2, 3, 4], [8, 0, 0, 0], [0, 0, 0, 0]]) if rows is None else rows
    return LayerStatistics(torch.tensor(tokens), dict.fromkeys(ROLES, own), torch.ones(IN, dtype=torch.float64))


TOKENS = [30, 10, 0]
ENERGY = torch.tensor([[60.0, 20, 0]] * 2 + [[600.0, 200, 0]], dtype=torch.float64)


def made(choice: Sensitivity, measured: LayerStatistics | None = None, energy: Tensor = ENERGY) -> LayerSensitivity:
    own = measured or statistics(TOKENS)
    return LayerSensitivity(choice, own, energy, own.tokens)


def loss(found: MatrixSensitivity, error: Tensor, gram: Tensor | None) -> float:
    """What an error `[out, in]` costs: by its spectrum in the norm of the inputs behind `gram`, or in the plain one."""
    scaled = error if found.row_scale is None else found.row_scale.double()[:, None] * error
    norm = scaled if gram is None else scaled @ torch.linalg.cholesky(gram)
    return found.weight * float(norm.square().sum())


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


def test_by_matrix_is_the_mean_of_the_channels() -> None:
    rows = statistics(TOKENS).fisher["up"]
    for expert in (0, 1):
        found = made("matrix").of("up", expert, IN, whitened=True)
        assert found.row_scale is None
        assert found.weight == pytest.approx(float(channels(expert, [60.0, 20, 0], rows).mean()), rel=1e-12)


def test_a_silent_channel_keeps_a_thousandth_of_the_mean() -> None:
    rows = torch.tensor([[1e6, 0, 0, 0]] * 3)
    found = made("channel", statistics(TOKENS, rows)).of("up", 0, IN, whitened=True)
    assert found.row_scale is not None
    square = found.row_scale.double().square()
    mean = float(channels(0, [60.0, 20, 0], rows).mean())
    torch.testing.assert_close(square[1:], torch.full((3,), 1e-3 * mean, dtype=torch.float64), rtol=1e-6, atol=0)
    assert float(square[0]) == pytest.approx(4 * mean, rel=1e-6)


@pytest.mark.parametrize("expert", [0, 1, 2])
@pytest.mark.parametrize("choice", ["channel", "matrix", "none"])
def test_white_inputs_cost_the_same_with_and_without_whitening(choice: Sensitivity, expert: int) -> None:
    """On inputs whose channels carry alike, the Gram matrix is the identity times energy / inputs. Where no token came,
    it is that of one average token."""
    found = made(choice)
    error = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = (ENERGY[1, expert] or ENERGY[1].sum() / sum(TOKENS)) / IN * torch.eye(IN, dtype=torch.float64)
    plain = loss(found.of("up", expert, IN, whitened=False), error, None)
    assert plain == pytest.approx(loss(found.of("up", expert, IN, whitened=True), error, gram), rel=1e-6)


@pytest.mark.parametrize("role", ["up", "down"])
@pytest.mark.parametrize("whitened", [True, False])
def test_an_error_in_all_channels_costs_the_same_by_channel_and_by_matrix(role: Role, whitened: bool) -> None:
    """And as much as without sensitivities, but for one factor, if all channels of all matrices matter alike."""
    error = torch.ones(OUT, 1, dtype=torch.float64) * torch.linspace(-1, 2, IN, dtype=torch.float64)
    gram = torch.eye(IN, dtype=torch.float64) if whitened else None
    even = statistics(TOKENS, torch.tensor([3.0, 1, 0])[:, None].expand(E, OUT))
    even.fisher["down"] = even.fisher["down"] * 10  # as their energy is
    for expert in range(E):
        for measured in (statistics(TOKENS), even):
            by_channel, by_matrix, alike = (
                loss(made(choice, measured).of(role, expert, IN, whitened=whitened), error, gram)
                for choice in ("channel", "matrix", "none")
            )
            assert by_channel == pytest.approx(by_matrix, rel=2e-3)  # but for the floor of silent channels
        assert by_matrix == pytest.approx(alike / 20, rel=1e-6)


@pytest.mark.parametrize("whitened", [True, False])
@pytest.mark.parametrize("choice", ["channel", "matrix", "none"])
def test_an_unreached_expert_costs_what_one_average_token_does(choice: Sensitivity, whitened: bool) -> None:
    """Next to it an expert with one token, which is like the layer's others."""
    energy = torch.tensor([[60.0, 2, 0]] * 3, dtype=torch.float64)
    rows = torch.tensor([30.0, 1, 0])[:, None] * torch.tensor([1.0, 2, 3, 4])
    found = made(choice, statistics([30, 1, 0], rows), energy)
    error = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = 0.2 * torch.eye(IN, dtype=torch.float64) if whitened else None
    one, none = (loss(found.of("up", expert, IN, whitened=whitened), error, gram) for expert in (1, 2))
    assert none == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("share", ["v", "u"])
@pytest.mark.parametrize("whitened", [True, False])
def test_jointly_experts_that_are_alike_cost_what_each_does(share: SharedFactor, whitened: bool) -> None:
    energy = torch.full((3, E), 40.0, dtype=torch.float64)
    measured = statistics([20] * E, torch.tensor([1.0, 2, 3, 4]).expand(E, OUT))
    for choice in ("channel", "matrix", "none"):
        found = made(choice, measured, energy)
        own = found.of("up", 0, IN, whitened=whitened)
        joint = found.jointly("up", IN, share, whitened=whitened)
        assert joint.weight == pytest.approx(own.weight, rel=1e-12)
        assert (joint.row_scale is None) == (own.row_scale is None)
        if own.row_scale is not None and joint.row_scale is not None:
            torch.testing.assert_close(joint.row_scale, own.row_scale.repeat(E if share == "v" else 1))


def test_a_matrix_whose_gradients_vanish_costs_nothing() -> None:
    measured = statistics(TOKENS)
    measured.fisher["down"] = torch.zeros(E, OUT)
    found = made("channel", measured).of("down", 0, IN, whitened=True)
    assert (found.row_scale, found.weight) == (None, 0.0)


@pytest.mark.parametrize("choice", ["channel", "matrix"])
def test_without_fisher_all_errors_count_the_same(choice: Sensitivity) -> None:
    flat = statistics(TOKENS, torch.zeros(E, OUT))
    for measured in (flat, None):
        found = LayerSensitivity(choice, measured, ENERGY, torch.tensor(TOKENS)).of("up", 0, IN, whitened=True)
        assert (found.row_scale, found.weight) == (None, 1.0)


def test_nothing_measured_at_all() -> None:
    found = LayerSensitivity("channel", None, torch.zeros(3, E), torch.zeros(E)).of("up", 0, IN, whitened=False)
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
    found = LayerSensitivity("channel", measured, energy, measured.tokens).of("up", 0, IN, whitened=True)
    assert found.row_scale is not None
    # Spectra are sums over tokens, the Fisher information is a mean over windows: hence the division.
    expected = gradient.square().mean(0) / windows
    torch.testing.assert_close(found.row_scale.double().square(), expected, rtol=1e-5, atol=0)
    assert math.isclose(found.weight, 1.0)
