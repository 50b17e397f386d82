"""Statistics of one layer: against autograd on the whole model, and against activations computed by hand."""

import weakref
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from moetool.architectures import ROLES, MoEShape, Role, find_architecture
from moetool.calibration.collectors import FisherCollector, GramCollector, LayerStatistics, UsageCollector
from moetool.calibration.held_experts import ExpertRun
from moetool.calibration.peers import Peers
from moetool.calibration.streaming import StreamedModel
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.reader import Checkpoint
from moetool.quiet import quiet

WINDOWS, LENGTH, LAYERS = 5, 24, 3
SHAPE = MoEShape(experts=4, top_k=2, hidden=32, intermediate=48)
CPU = torch.device("cpu")


def base(role: Role) -> Tensor:
    """Some base; what the collectors make of differences must not depend on which."""
    generator = torch.Generator().manual_seed(len(role))
    return torch.randn(SHAPE.matrix(role), generator=generator) / SHAPE.matrix(role)[1] ** 0.5


class Measured:
    """All collectors on all layers of a forward and a reverse sweep, in batches of 2, 2 and 1 windows."""

    def __init__(self, path: Path, windows: Tensor, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        checkpoint = Checkpoint.open(path)
        model = StreamedModel(checkpoint, find_architecture(checkpoint.config), dtype, CPU)
        sweep = Sweep(model, windows, directory)
        sweep.batch_size = 2
        self.fisher: dict[int, FisherCollector] = {}
        self.grams: dict[int, GramCollector] = {}
        self.usage: dict[int, UsageCollector] = {}
        self.backward_usage: dict[int, UsageCollector] = {}
        sweep.embed()
        for index in range(LAYERS):
            with model.layer(index) as layer:
                experts: Any = layer.get_submodule("mlp.experts")
                down = experts.down_proj
                self.usage[index] = UsageCollector(SHAPE)
                self.grams[index] = GramCollector(
                    SHAPE, lambda e, down=down: down[e] - base("down"), 2 * windows.numel(), CPU
                )
                sweep.forward(index, layer, [self.usage[index], self.grams[index]])
        self.loss = sweep.head()
        for index in reversed(range(LAYERS)):
            with model.layer(index) as layer:
                self.fisher[index] = FisherCollector(model.matrix, SHAPE, CPU, None, sweep.loss_scale)
                self.backward_usage[index] = UsageCollector(SHAPE)
                sweep.backward(index, layer, [self.backward_usage[index], self.fisher[index]])


class Whole:
    """The same from the whole model: autograd per window, hooks, and a loop over tokens."""

    def __init__(self, path: Path, windows: Tensor) -> None:
        with quiet():
            self.model: Any = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval()
        self.squared: list[dict[Role, Tensor]] = [
            {role: torch.zeros(SHAPE.experts, *SHAPE.matrix(role), dtype=torch.float64) for role in ROLES}
            for _ in range(LAYERS)
        ]
        self.routed: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(LAYERS)]
        for index, layer in enumerate(self.model.model.layers):
            layer.mlp.experts.register_forward_pre_hook(
                lambda _, arguments, index=index: self.routed[index].append(tuple(a.detach() for a in arguments))
            )
        losses = []
        for window in windows:
            self.model.zero_grad()
            # By hand, so that the shift is in plain sight: the token after next is not the label.
            logits = self.model(input_ids=window[None]).logits[0]
            loss = -logits.log_softmax(-1)[torch.arange(LENGTH - 1), window[1:]].mean()
            loss.backward()
            losses.append(loss.item())
            for index in range(LAYERS):
                gate_up, down = self.experts(index).gate_up_proj.grad, self.experts(index).down_proj.grad
                gate, up = gate_up.chunk(2, dim=1)
                for role, gradient in (("gate", gate), ("up", up), ("down", down)):
                    self.squared[index][role] += gradient.double().square()
        self.loss = sum(losses) / len(losses)

    def experts(self, index: int) -> Any:
        return self.model.model.layers[index].mlp.experts

    def weight(self, index: int, role: Role) -> Tensor:
        """`[experts, out, in]` fp64."""
        module = self.experts(index)
        if role == "down":
            return module.down_proj.detach().double()
        return module.gate_up_proj.detach().double().chunk(2, dim=1)[("gate", "up").index(role)]

    def given(self, index: int, expert: int) -> tuple[Tensor, Tensor]:
        """Inputs and activations of one expert over all windows, in order."""
        calls = self.routed[index][:WINDOWS]
        hidden, routed_to = torch.cat([x for x, _, _ in calls]).double(), torch.cat([to for _, to, _ in calls])
        inputs = hidden[(routed_to == expert).any(1)]
        gate, up = (inputs @ self.weight(index, role)[expert].T for role in ("gate", "up"))
        return inputs, F.silu(gate) * up


@pytest.fixture(scope="module")
def windows(tiny_tokens: Tensor) -> Tensor:
    return tiny_tokens[: WINDOWS * LENGTH].view(WINDOWS, LENGTH)


@pytest.fixture(scope="module")
def measured(tiny_mixtral: Path, windows: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tiny_mixtral, windows, tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def whole(tiny_mixtral: Path, windows: Tensor) -> Whole:
    return Whole(tiny_mixtral, windows)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert found.shape == expected.shape
    assert expected.any()
    assert (found.double() - expected.double()).norm() / expected.double().norm() < tolerance


each_layer = pytest.mark.parametrize("index", range(LAYERS))
each_role = pytest.mark.parametrize("role", ROLES)


def test_the_loss_is_the_next_tokens(measured: Measured, whole: Whole) -> None:
    assert measured.loss == pytest.approx(whole.loss, rel=1e-6)


@each_layer
@each_role
def test_fisher_is_the_squared_gradient_of_each_window(
    measured: Measured, whole: Whole, index: int, role: Role
) -> None:
    squared, fisher = whole.squared[index][role], measured.fisher[index]
    tolerance = 3e-6  # squared, and gradients of fp32 models differ by 1e-6 with the order of sums
    close(fisher.total[role], squared.sum(0), tolerance)
    close(fisher.weighted[role], (squared * whole.weight(index, role)).sum(0), tolerance)
    close(fisher.rows[role], squared.sum(2), tolerance)
    for expert in range(SHAPE.experts):
        close(fisher.rows[role][expert], squared[expert].sum(1), tolerance)


def test_fisher_is_not_of_anything_similar(measured: Measured, whole: Whole, windows: Tensor) -> None:
    """What the test above would miss if its tolerance were loose: all windows in one loss, or another shift."""
    whole.model.zero_grad()
    logits = whole.model(input_ids=windows).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten(), reduction="sum").backward()
    joint = (whole.experts(0).down_proj.grad / (LENGTH - 1)).square().sum(0)
    whole.model.zero_grad()
    logits = whole.model(input_ids=windows[:1]).logits
    F.cross_entropy(logits[0, :-2], windows[0, 2:]).backward()
    shifted_twice = whole.experts(0).down_proj.grad.square().sum(0)
    for other in (joint, shifted_twice):
        total = measured.fisher[0].total["down"]
        assert (total - other).norm() / total.norm() > 0.1


@each_layer
def test_usage(measured: Measured, whole: Whole, index: int) -> None:
    routed_to = torch.cat([to for _, to, _ in whole.routed[index]][:WINDOWS])
    weights = torch.cat([w for _, _, w in whole.routed[index]][:WINDOWS]).double()
    hidden = torch.cat([x for x, _, _ in whole.routed[index]][:WINDOWS]).double()
    usage = measured.usage[index]
    assert usage.tokens.tolist() == torch.bincount(routed_to.flatten(), minlength=4).tolist()
    assert int(usage.tokens.sum()) == 2 * WINDOWS * LENGTH
    summed = torch.zeros(len(hidden), SHAPE.intermediate, dtype=torch.float64)
    for token in range(len(hidden)):
        for expert, weight in zip(routed_to[token].tolist(), weights[token], strict=True):
            gate, up = (whole.weight(index, role)[expert] @ hidden[token] for role in ("gate", "up"))
            summed[token] += weight * F.silu(gate) * up
    close(usage.channel_energy, summed.square().sum(0), 1e-5)


@each_layer
def test_usage_is_the_same_backwards(measured: Measured, index: int) -> None:
    assert measured.backward_usage[index].tokens.equal(measured.usage[index].tokens)
    assert measured.backward_usage[index].channel_energy.equal(measured.usage[index].channel_energy)


@each_layer
@pytest.mark.parametrize("expert", range(SHAPE.experts))
def test_grams(measured: Measured, whole: Whole, index: int, expert: int) -> None:
    grams = measured.grams[index]
    inputs, activations = whole.given(index, expert)
    assert grams.inputs[expert].count == grams.down[expert].count == len(inputs)
    close(grams.inputs[expert].matrix(), inputs.T @ inputs, 1e-5)
    lost = activations @ (whole.weight(index, "down")[expert] - base("down").double()).T
    close(grams.down[expert].matrix(), lost.T @ lost, 1e-5)
    close(grams.energy[:2, expert], inputs.square().sum().expand(2), 1e-5)
    close(grams.energy[2, expert], activations.square().sum(), 1e-5)
    close(grams.magnitude["input"][expert], inputs.abs().sum(0), 1e-5)
    close(grams.magnitude["activation"][expert], activations.abs().sum(0), 1e-5)


def test_the_sample_is_every_nth_activation(measured: Measured, whole: Whole) -> None:
    """240 routed pairs, and room for 2 · 32: every third, counted across experts and batches."""
    every = []
    for start in range(0, WINDOWS, 2):  # as they come: by batch, then by expert
        part = [whole.routed[0][window] for window in range(start, min(start + 2, WINDOWS))]
        hidden, routed_to = torch.cat([x for x, _, _ in part]).double(), torch.cat([to for _, to, _ in part])
        for expert in range(SHAPE.experts):
            inputs = hidden[(routed_to == expert).any(1)]
            gate, up = (inputs @ whole.weight(0, role)[expert].T for role in ("gate", "up"))
            every.append(F.silu(gate) * up)
    expected = torch.cat(every)[::3]
    assert len(expected) == 80
    close(measured.grams[0].sample(), expected, 1e-5)


def observe(collector: GramCollector, expert: int, inputs: Tensor, activation: Tensor) -> None:
    nothing = torch.empty(0)
    collector.observe(
        expert, torch.zeros(len(inputs)), inputs, ExpertRun(nothing, activation, nothing, nothing, torch.relu)
    )


def test_a_narrow_down_keeps_the_gram_of_its_input() -> None:
    shape = MoEShape(experts=2, top_k=1, hidden=12, intermediate=8)
    collector = GramCollector(shape, lambda expert: torch.zeros(12, 8), 40, CPU)
    activation = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    observe(collector, 1, torch.ones(40, 12), activation)
    assert not collector.wide_down
    close(collector.down[1].matrix(), activation.double().T @ activation.double())
    assert collector.down[0].count == 0


def test_a_delta_is_made_once_for_all_batches_and_let_go_after_the_last() -> None:
    """No more of them are kept than their factorisation has room for."""
    shape, made = MoEShape(experts=20, top_k=2, hidden=4, intermediate=6), Counter[int]()
    alive: list[weakref.ref[Tensor]] = []

    def down_delta(expert: int) -> Tensor:
        made[expert] += 1
        alive.append(weakref.ref(own := torch.full((4, 6), float(expert))))
        return own

    collector, rows = GramCollector(shape, down_delta, 60, CPU), torch.ones(3, 6)
    for _ in range(3):
        for expert in range(20):
            observe(collector, expert, torch.ones(3, 4), rows)
    assert [made[expert] for expert in range(20)] == [1] * 12 + [3] * 8
    assert sum(own() is not None for own in alive) == 12
    assert collector.down[19].matrix().equal(torch.full((4, 4), 9.0 * (6 * 19) ** 2).double())
    collector.reduce(Peers())
    assert all(own() is None for own in alive)


def test_fisher_squares_windows_one_by_one() -> None:
    """Two windows whose gradients cancel: the square of their sum would be zero."""

    shape = MoEShape(experts=1, top_k=1, hidden=2, intermediate=3)
    collector = FisherCollector(lambda expert, role: torch.ones(shape.matrix(role)), shape, CPU)
    activation = torch.ones(4, 3)
    output = torch.zeros(4, 2, requires_grad=True) * 1
    gate_up = torch.zeros(4, 6, requires_grad=True) * 1
    windows = torch.tensor([0, 0, 1, 1])
    collector.observe(0, windows, torch.ones(4, 2), ExpertRun(gate_up, activation, output, output, torch.relu))
    (output * torch.tensor([[1.0, 2], [1, 2], [-1, -2], [-1, -2]])).sum().backward()
    assert collector.total["down"].tolist() == [[8.0] * 3, [32.0] * 3]
    assert collector.weighted["down"].tolist() == [[8.0] * 3, [32.0] * 3]
    assert collector.rows["down"].tolist() == [[24.0, 96.0]]
    assert not collector.total["gate"].any()


def test_fisher_of_many_equal_terms_does_not_stall() -> None:
    """bf16 accumulators stop at 256 equal terms."""

    shape = MoEShape(experts=1, top_k=1, hidden=1, intermediate=1)
    collector = FisherCollector(lambda expert, role: torch.ones(1, 1, dtype=torch.bfloat16), shape, CPU)
    for _ in range(3):
        output = torch.zeros(200, 1, dtype=torch.bfloat16, requires_grad=True) * 1
        gate_up = torch.zeros(200, 2, dtype=torch.bfloat16, requires_grad=True) * 1
        ones = torch.ones(200, 1, dtype=torch.bfloat16)
        collector.observe(0, torch.arange(200), ones, ExpertRun(gate_up, ones, output, output, torch.relu))
        output.sum().backward()
    assert collector.total["down"].item() == 600
    assert collector.total["down"].dtype == torch.float32


def test_statistics_round_trip(measured: Measured) -> None:
    fisher = {role: rows.float() for role, rows in measured.fisher[1].rows.items()}
    before = LayerStatistics(measured.usage[1].tokens, fisher, measured.usage[1].channel_energy)
    after = LayerStatistics.from_tensors(before.tensors())
    assert after.tokens.equal(before.tokens)
    assert after.channel_energy.equal(before.channel_energy)
    assert all(after.fisher[role].equal(before.fisher[role]) for role in ROLES)
    assert before.has_fisher
    assert not LayerStatistics.from_usage(measured.usage[1], SHAPE).has_fisher


def test_collectors_do_not_change_the_result(tiny_mixtral: Path, windows: Tensor, tmp_path: Path) -> None:
    """With and without collectors, to the last bit: what is measured is what other passes compute."""
    checkpoint = Checkpoint.open(tiny_mixtral)
    model = StreamedModel(checkpoint, find_architecture(checkpoint.config), torch.float32, CPU)
    sweep = Sweep(model, windows, tmp_path)
    sweep.embed()
    with model.layer(0) as layer:
        sweep.forward(0, layer)
        plain = sweep.hidden(1).read(0, WINDOWS)
        sweep.forward(0, layer, [UsageCollector(SHAPE)])
        assert sweep.hidden(1).read(0, WINDOWS).equal(plain)
        sweep.hidden(1).path.unlink()
        sweep.forward(0, layer, [UsageCollector(SHAPE)], keep=False)
        assert not sweep.hidden(1).path.exists()
        assert "forward" not in vars(layer.get_submodule("mlp.experts"))


@pytest.mark.parametrize("index", range(LAYERS))
def test_fisher_in_16_bits_is_that_in_32(measured_in: Any, index: int) -> None:
    """Gradients of a mean over many tokens are below what fp16 can hold, unless the loss is scaled."""
    exact = measured_in(torch.float32).fisher[index].rows
    for dtype, tolerance in ((torch.float16, 0.01), (torch.bfloat16, 0.06)):
        rows = measured_in(dtype).fisher[index].rows
        for role in ROLES:
            assert (rows[role] - exact[role]).norm() < tolerance * exact[role].norm()


@pytest.fixture(scope="module")
def measured_in(make_mixtral: Any, save_model: Any, tiny_tokens: Tensor, tmp_path_factory: Any) -> Any:
    """`measured_in(dtype)`: what is measured of a model with small gradients on two windows of 128 tokens."""
    model = make_mixtral(seed=3)
    with torch.no_grad():
        model.lm_head.weight *= 0.002
    path = save_model(model, tmp_path_factory.mktemp("quiet") / "model")
    return cache(lambda dtype: Measured(path, tiny_tokens[:256].view(2, 128), tmp_path_factory.mktemp("swept"), dtype))
