"""Factors of a layer's deltas, of which errors at the outputs count together."""

import pytest
import torch
from draws import normal
from torch import Tensor
from torch.nn import functional as F

from moetool.architectures import MoEShape, Role
from moetool.bases.delta import Deltas
from moetool.bases.layer_base import LayerBase
from moetool.calibration.collectors import GramCollector, LayerStatistics
from moetool.calibration.held_experts import ExpertRun
from moetool.calibration.output_metric import LayerMetric
from moetool.calibration.slopes import SlopeSamples
from moetool.compress.factors.files import LayerFactors
from moetool.compress.factors.options import FactorOptions
from moetool.format.layout import LayerLayout, delta_name
from moetool.representations.low_rank import LowRank

SHAPE = MoEShape(experts=2, top_k=1, hidden=12, intermediate=20)
RANK, TOKENS = 3, 300
CPU = torch.device("cpu")
ROLES: tuple[Role, ...] = ("gate", "up", "down")


def weight(expert: int, role: Role) -> Tensor:
    return normal(*SHAPE.matrix(role), seed=10 * expert + ROLES.index(role)) / 4


def activate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def inputs(expert: int) -> Tensor:
    return normal(TOKENS, SHAPE.hidden, seed=30 + expert) @ (normal(SHAPE.hidden, SHAPE.hidden, seed=40) / 3)


GRADIENTS = normal(50, SHAPE.hidden, seed=50) @ normal(SHAPE.hidden, SHAPE.hidden, seed=51)


class Layer:
    """Two experts on a base of zeros, their inputs, and gradients at the layer's output."""

    def __init__(self, *, measured: bool) -> None:
        self.measured = measured
        rows = {role: torch.ones(SHAPE.experts, SHAPE.matrix(role)[0]) for role in ROLES}
        energy = torch.ones(SHAPE.intermediate, dtype=torch.float64)
        counts = torch.full((SHAPE.experts,), TOKENS)
        statistics = LayerStatistics(counts, rows, energy)
        matrices = {role: torch.zeros(SHAPE.matrix(role)) for role in ROLES}
        self.base = LayerBase(matrices, torch.arange(SHAPE.intermediate), SHAPE.intermediate, statistics)
        self.grams = GramCollector(
            SHAPE, lambda expert: weight(expert, "down"), SHAPE.experts * TOKENS, CPU, slopes=SlopeSamples()
        )
        for expert in range(SHAPE.experts):
            given = inputs(expert)
            gate_up = given @ torch.cat([weight(expert, "gate"), weight(expert, "up")]).T
            hidden = activate(gate_up)
            product = hidden @ weight(expert, "down").T
            self.grams.at(expert * TOKENS)
            self.grams.observe(
                expert, torch.zeros(TOKENS), given, ExpertRun(gate_up, hidden, product, product, activate)
            )

    def factors(self) -> LayerFactors:
        moment = GRADIENTS.T @ GRADIENTS / len(GRADIENTS)
        metric = LayerMetric(moment, self.grams, SHAPE, weight) if self.measured else None
        deltas = Deltas(weight, self.base, CPU)
        return LayerFactors(SHAPE, deltas, FactorOptions(rank=RANK), self.grams, metric=metric)

    def matrices(self) -> dict[tuple[int, Role], Tensor]:
        """What the encoded deltas decode to, by expert and role."""
        form = LowRank(RANK)
        layout = LayerLayout(SHAPE, dict.fromkeys(ROLES, (form,) * SHAPE.experts), SHAPE.intermediate)
        encoded = dict(self.factors().encode(layout, torch.float32))
        return {
            (expert, role): form.decode(
                {name: encoded[delta_name(expert, role, name)] for name in ("u", "v")},
                SHAPE.matrix(role),
                torch.float32,
            )
            for expert in range(SHAPE.experts)
            for role in ROLES
        }


def lost(found: dict[tuple[int, Role], Tensor], expert: int, role: Role) -> float:
    """The mean over tokens x and gradients g of (g · change)² at the layer's output, when one matrix is changed; of
    gate and up to first order."""
    given, error = inputs(expert), found[expert, role] - weight(expert, role)
    gate_up = given @ torch.cat([weight(expert, "gate"), weight(expert, "up")]).T
    if role == "down":
        change = activate(gate_up) @ error.T
    else:
        gate, up = gate_up.chunk(2, -1)
        gate = gate.requires_grad_(True)
        [silu_slope] = torch.autograd.grad(F.silu(gate).sum(), gate)
        slope = silu_slope * up if role == "gate" else F.silu(gate.detach())
        change = (slope * (given @ error.T)) @ weight(expert, "down").T
    return float((change @ GRADIENTS.T).square().mean())


@pytest.mark.parametrize("role", ROLES)
def test_what_the_loss_sees_together_is_kept(role: Role) -> None:
    together, by_channel = Layer(measured=True).matrices(), Layer(measured=False).matrices()
    for expert in range(SHAPE.experts):
        assert lost(together, expert, role) < 0.97 * lost(by_channel, expert, role)


def test_gate_and_up_count_by_channel_where_no_slopes_were_sampled() -> None:
    layer, unmeasured = Layer(measured=True), Layer(measured=False)
    layer.grams.slopes = None
    found, expected = layer.matrices(), unmeasured.matrices()
    for expert in range(SHAPE.experts):
        assert found[expert, "gate"].equal(expected[expert, "gate"])
        assert found[expert, "up"].equal(expected[expert, "up"])
        assert not found[expert, "down"].equal(expected[expert, "down"])
