"""Gates that are exactly zero with a given probability."""

import math

import pytest
import torch

from moetool.numerics.hard_concrete import SHIFT, log_phi_for, median_gate, open_probability, sampled_gate


def test_constants() -> None:
    assert pytest.approx(1.598597, abs=1e-6) == SHIFT
    assert log_phi_for(0.05) == pytest.approx(1.345842, abs=1e-6)
    assert log_phi_for(0.5) == pytest.approx(-SHIFT, abs=1e-12)


def test_the_probability_that_a_gate_is_open() -> None:
    log_phi = torch.linspace(-6, 6, 25, dtype=torch.float64)
    assert torch.allclose(open_probability(log_phi), torch.sigmoid(log_phi + 1.598597), atol=1e-7, rtol=0)
    for share in (0.01, 0.05, 0.75):
        assert open_probability(torch.tensor(log_phi_for(share))).item() == pytest.approx(1 - share, abs=1e-6)


def test_the_median_is_zero_up_to_the_threshold() -> None:
    """It is zero exactly where a gate is rather closed than open, and one where s would be more than one."""
    around = torch.tensor([-9.0, -SHIFT - 1e-5, -SHIFT + 1e-5, 0.0, SHIFT - 1e-5, SHIFT + 1e-5, 9.0])
    gates = median_gate(around.double())
    assert (gates == 0).tolist() == [True, True, False, False, False, False, False]
    assert (gates == 1).tolist() == [False, False, False, False, False, True, True]
    assert gates[3].item() == pytest.approx(0.5)
    assert ((open_probability(around) > 0.5) == (gates > 0)).all()


@pytest.mark.parametrize("share", [0.05, 0.5, 0.75])
def test_draws_are_zero_as_often_as_they_should(share: float) -> None:
    count = 200_000
    torch.manual_seed(0)
    gates = sampled_gate(torch.full((count,), log_phi_for(share)))
    found = (gates == 0).double().mean().item()
    assert abs(found - share) < 5 * math.sqrt(share * (1 - share) / count)
    assert gates.min() == 0
    assert gates.max() == 1
    assert gates.median().item() == pytest.approx(median_gate(torch.tensor(log_phi_for(share))).item(), abs=0.02)


def test_gradients_are_derivatives() -> None:
    log_phi = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(median_gate, log_phi)
    assert torch.autograd.gradcheck(open_probability, log_phi)

    def drawn(log_phi: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return sampled_gate(log_phi)

    assert torch.autograd.gradcheck(drawn, log_phi)


def test_closed_gates_have_no_gradient_but_the_penalty_has() -> None:
    log_phi = torch.tensor([-3.0, 0.0], requires_grad=True)
    median_gate(log_phi).sum().backward()
    assert log_phi.grad is not None
    assert (log_phi.grad != 0).tolist() == [False, True]
    (penalty,) = torch.autograd.grad(open_probability(log_phi).sum(), log_phi)
    assert (penalty > 0).all()


def test_draws_in_half_precision_are_finite() -> None:
    torch.manual_seed(0)
    gates = sampled_gate(torch.zeros(20_000, dtype=torch.bfloat16))
    assert torch.isfinite(gates).all()
