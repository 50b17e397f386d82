"""The evidence that a conversion brings along: differences, losses and routing, measured right."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from upcycled import EXPERTS, TOP_K, load, logits, open_dense, prompt, save_dense, upcycled, write_upcycled

from moetool.calibration.streaming import StreamedModel
from moetool.checkpoint.reader import Checkpoint
from moetool.convert.proof import Routing, Run, compare, mean_loss, run
from moetool.convert.results import Shares
from moetool.format.families import architecture_of
from moetool.runtime.dense import DenseModel
from moetool.upcycle.upcycling import Upcycled

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> DenseModel:
    return open_dense(save_dense(tmp_path_factory.mktemp("proof") / "dense", "llama"))


def streamed(made: Path) -> StreamedModel:
    checkpoint = Checkpoint.open(made)
    return StreamedModel(checkpoint, architecture_of(checkpoint.config), torch.float32, CPU, experts_on_disk=True)


def routed(path: Path, model: Upcycled) -> Run:
    return run(streamed(write_upcycled(path, model)), prompt(), lambda: None)


def test_a_run_gives_the_models_logits(dense: DenseModel) -> None:
    ticks: list[int] = []
    model = StreamedModel(dense.checkpoint, dense.architecture, torch.float32, CPU)
    found = run(model, prompt(), lambda: ticks.append(1))
    torch.testing.assert_close(found.logits, logits(load(dense.checkpoint.path)), rtol=1e-6, atol=1e-6)
    assert found.routing == {}
    assert len(ticks) == 3


def router_logits(path: Path) -> list[Tensor]:
    """From the routers' inputs and rows alone."""
    model = load(path)
    seen: list[Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    for router in routers:
        (rows,) = router.parameters()
        router.register_forward_pre_hook(lambda _, inputs, rows=rows: seen.append(inputs[0] @ rows.T))
    logits(model)
    return [one.reshape(-1, EXPERTS).detach() for one in seen]


@pytest.mark.parametrize("target", ["mixtral", "granitemoe", "granitemoeshared", "qwen2_moe", "qwen3_moe", "flex_olmo"])
def test_routing_is_that_of_the_model(target: str, tmp_path: Path) -> None:
    family = {"qwen3_moe": "qwen3", "flex_olmo": "olmo2"}.get(target, "llama")
    source = open_dense(save_dense(tmp_path / "dense", family))
    shared: Any = "half" if target == "granitemoeshared" else "none"
    found = routed(tmp_path / "made", upcycled(source, target, shared=shared))
    expected = router_logits(tmp_path / "made")
    assert list(found.routing) == [0, 1, 2]
    for layer, raw in enumerate(expected):
        chosen = raw.topk(TOP_K).indices.flatten()
        shares = torch.bincount(chosen, minlength=EXPERTS).double() / len(chosen)
        assert found.routing[layer].shares.equal(shares)
        probabilities = raw.double().softmax(-1)
        entropy = -(probabilities * probabilities.log()).sum(-1).mean().item()
        assert found.routing[layer].entropy == pytest.approx(entropy, rel=1e-4)


def test_only_moe_models_route(dense: DenseModel, tmp_path: Path) -> None:
    found = routed(tmp_path / "made", upcycled(dense, "qwen2_moe", layers=(0, 2)))
    assert list(found.routing) == [0, 2]


def test_entropy_at_its_ends(dense: DenseModel, tmp_path: Path) -> None:
    """A router of zeros knows nothing; one with huge rows is as good as certain."""
    flat = routed(tmp_path / "flat", upcycled(dense, router=lambda _: torch.zeros(EXPERTS, 32)))
    sharp = routed(tmp_path / "sharp", upcycled(dense, router=lambda layer: 1e4 * torch.eye(EXPERTS, 32)))
    assert all(layer.entropy == pytest.approx(math.log(EXPERTS), rel=1e-6) for layer in flat.routing.values())
    assert all(layer.entropy < 0.05 for layer in sharp.routing.values())


def test_nothing_watches_after_a_run(dense: DenseModel, tmp_path: Path) -> None:
    model = streamed(write_upcycled(tmp_path / "made", upcycled(dense)))
    run(model, prompt(), lambda: None)
    assert not any(module._forward_hooks for module in model.model.modules())


def test_the_loss_is_transformers_own(dense: DenseModel) -> None:
    model = load(dense.checkpoint.path)
    with torch.no_grad():
        expected = model(input_ids=prompt(), labels=prompt()).loss.item()
    assert mean_loss(logits(model), prompt()) == pytest.approx(expected, rel=1e-6)


def random_run(seed: int, routing: dict[int, Routing] | None = None) -> Run:
    draw = torch.Generator().manual_seed(seed)
    return Run(torch.randn(2, 24, 288, generator=draw), routing or {})


def test_comparing() -> None:
    one = random_run(0)
    same = compare(one, one, prompt())
    assert same.relative_logit_error == 0.0
    assert same.tokens == 48
    assert same.losses is not None
    assert same.losses.loss_mixture == same.losses.loss_dense
    assert same.losses.loss_dense == pytest.approx(mean_loss(one.logits, prompt()), abs=1e-6)
    assert same.routing is None
    assert compare(one, one, prompt(), predicts=False).losses is None
    assert compare(one, Run(1.25 * one.logits), prompt()).relative_logit_error == 0.25
    # Relative to the dense model's, and not the other way round.
    assert compare(Run(1.25 * one.logits), one, prompt()).relative_logit_error == pytest.approx(0.2, rel=1e-3)
    other = compare(one, random_run(1), prompt()).losses
    assert other is not None
    assert other.loss_mixture == pytest.approx(mean_loss(random_run(1).logits, prompt()), abs=1e-6)
    assert other.loss_mixture != other.loss_dense


def test_routing_is_summed_up() -> None:
    routing = {
        0: Routing(torch.tensor([0.5, 0.3, 0.2]).double(), 1.0),
        2: Routing(torch.tensor([0.1, 0.1, 0.8]).double(), 0.5),
    }
    found = compare(random_run(0), random_run(1, routing), prompt())
    assert found.routing == Shares(0.1, 0.8, 0.75)


def test_a_result_that_is_not_finite_cannot_pass() -> None:
    """The proof asks for an error below infinity."""
    for value in (math.nan, math.inf):
        wrong = random_run(0)
        wrong.logits[0, 0, 0] = value
        assert not compare(random_run(0), wrong, prompt()).relative_logit_error < math.inf
