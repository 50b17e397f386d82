"""How errors at the outputs of an expert's matrices count together."""

import pytest
import torch
from draws import normal
from torch import Tensor

from moetool.architectures import Role
from moetool.calibration import output_metric
from moetool.calibration.output_metric import ExpertMetric, NeuronMetric, OutputMetric

HIDDEN, WIDTH, TOKENS = 5, 6, 40


@pytest.fixture
def undamped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTPUT_DAMPING", "_NEURON_DAMPING", "_FLOOR"):
        monkeypatch.setattr(output_metric, name, 0.0)


@pytest.fixture
def slopes() -> dict[Role, Tensor]:
    return {"gate": normal(TOKENS, WIDTH, seed=1), "up": normal(TOKENS, WIDTH, seed=2)}


def whole(metric: NeuronMetric) -> Tensor:
    every = torch.arange(WIDTH)
    roles: tuple[Role, ...] = ("gate", "up")
    return torch.cat([torch.cat([metric.between(one, other, every) for other in roles], 1) for one in roles])


@pytest.mark.usefixtures("undamped")
def test_what_an_error_at_gate_and_up_costs_if_slopes_and_gradients_do_not_depend_on_each_other(
    slopes: dict[Role, Tensor],
) -> None:
    """Over all pairs of a token's slopes s and a gradient g, an error e costs the mean of (Σ_i e_i s_i (Wᵀ g)_i)²."""
    gradients, down = normal(30, HIDDEN, seed=3), normal(HIDDEN, WIDTH, seed=4)
    seen = torch.linalg.cholesky(gradients.T @ gradients / 30).T @ down
    errors = normal(2 * WIDTH, seed=5)
    steep = torch.cat(list(slopes.values()), 1) * errors  # [tokens, 2 · width]
    felt = (gradients @ down).repeat(1, 2)  # [gradients, 2 · width]
    exact = (steep @ felt.T).square().mean()
    found = errors @ whole(NeuronMetric(slopes, seen)) @ errors
    assert float(found) == pytest.approx(float(exact), rel=1e-4)


def test_up_makes_good_for_gate_as_well_as_it_can(slopes: dict[Role, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient by up of what is lost is zero there, and what is left is what the metric of gate's rows counts."""
    monkeypatch.setattr(output_metric, "_MAKING_GOOD_DAMPING", 0.0)
    metric = NeuronMetric(slopes, normal(HIDDEN, WIDTH, seed=6))
    gate = normal(WIDTH, 7, seed=7)
    shift = metric.moved("up", {"gate": gate})
    assert shift is not None
    assert metric.moved("gate", {}) is None
    both, everything = torch.cat([gate, -shift]), whole(metric)
    torch.testing.assert_close((everything @ both)[WIDTH:], torch.zeros(WIDTH, 7), atol=1e-4, rtol=0)
    left = ((everything @ both) * both).sum()
    alone = metric.rows("gate").among(torch.arange(WIDTH))
    torch.testing.assert_close(((alone @ gate) * gate).sum(), left, rtol=1e-3, atol=1e-5)


def test_rows_in_any_order(slopes: dict[Role, Tensor]) -> None:
    metric, order = NeuronMetric(slopes, normal(HIDDEN, WIDTH, seed=6)), torch.tensor([4, 0, 3])
    every = metric.between("gate", "up", torch.arange(WIDTH))
    torch.testing.assert_close(metric.between("gate", "up", order), every[order][:, order])
    moment = normal(HIDDEN, HIDDEN, seed=8)
    found = OutputMetric(moment @ moment.T).among(order)
    torch.testing.assert_close(found.triu(1), (moment @ moment.T)[order][:, order].triu(1))


def test_experts_without_gates(slopes: dict[Role, Tensor]) -> None:
    metric = NeuronMetric({"up": slopes["up"]}, normal(HIDDEN, WIDTH, seed=6))
    assert metric.moved("up", {}) is None
    torch.linalg.cholesky(metric.rows("up").among(torch.arange(WIDTH)))


@pytest.mark.parametrize("scale", [0.0, 1e-9, 1.0])
def test_always_positive_definite(slopes: dict[Role, Tensor], scale: float) -> None:
    """Of one token, one gradient, or none."""
    few: dict[Role, Tensor] = {role: scale * own[:1] for role, own in slopes.items()}
    metric = NeuronMetric(few, scale * normal(1, WIDTH, seed=6))
    gradient = scale * normal(1, WIDTH, seed=7)
    for rows in (metric.rows("gate"), metric.rows("up"), OutputMetric(gradient.T @ gradient)):
        torch.linalg.cholesky(rows.among(torch.arange(WIDTH)))
    shift = metric.moved("up", {"gate": torch.ones(WIDTH, 2)})
    assert shift is not None
    assert bool(shift.isfinite().all())


def test_alone_a_role_counts_as_if_no_other_made_good_for_it(slopes: dict[Role, Tensor]) -> None:
    metric, every = NeuronMetric(slopes, normal(HIDDEN, WIDTH, seed=6)), torch.arange(WIDTH)
    expert = ExpertMetric(OutputMetric(torch.eye(HIDDEN)), lambda: metric)
    roles: tuple[Role, ...] = ("gate", "up")
    for role in roles:
        alone = expert.alone(role)
        assert alone is not None
        torch.testing.assert_close(alone.among(every), metric.between(role, role, every))
    gate, made_good = expert.alone("gate"), expert.rows("gate")
    assert gate is not None
    assert made_good is not None
    less = gate.among(every) - made_good.among(every)
    assert float(torch.linalg.eigvalsh(less).min()) > -1e-5 * float(less.diagonal().max())
    assert expert.alone("down") is expert.rows("down")


def test_an_expert_that_no_token_reached_has_the_metric_of_down_alone() -> None:
    metric = ExpertMetric(OutputMetric(torch.eye(HIDDEN)), lambda: None)
    assert metric.rows("up") is None
    matrix = torch.ones(WIDTH, 2)
    assert metric.target("up", matrix, {"gate": matrix}) is matrix
    assert metric.rows("down") is not None
