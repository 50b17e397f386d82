"""The constraint under which masks are found."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from upcycled import interpolated, load, open_dense, save_dense, write_upcycled

from moetool.errors import UsageError
from moetool.numerics.hard_concrete import EDGE, SHIFT, log_phi_for, median_gate
from moetool.runtime.modules.simoe import closed_share, open_share, overlap_penalty, sites
from moetool.runtime.modules.simoe_mixing import interpolation_of
from moetool.tune.choice import choose
from moetool.tune.masks import WAY, MaskConstraint, all_closed, parameter_groups, project

TARGET = 0.5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("masks")
    return write_upcycled(directory / "simoe", interpolated(open_dense(save_dense(directory / "dense", "llama"))))


@pytest.fixture
def model(path: Path) -> Any:
    return load(path)


def close(model: Any, share: float) -> None:
    """Let the medians of that share of all mask elements be zero."""
    with torch.no_grad():
        for site in sites(model).values():
            count = site.log_phi.numel()
            site.log_phi.fill_(log_phi_for(0.05)).flatten()[: round(share * count)] = -3.0


def step(constraint: MaskConstraint) -> float:
    none = SimpleNamespace()
    constraint.on_step_end(none, none, none)
    return constraint.logs()["multiplier"]


def test_the_way_is_from_the_start_to_where_the_median_closes() -> None:
    assert pytest.approx(log_phi_for(0.05) + SHIFT, abs=1e-4) == WAY


def test_the_multiplier_rises_while_the_constraint_is_violated_and_falls_to_zero(model: Any) -> None:
    constraint = MaskConstraint(model, TARGET, rate=2.0, overlap=0.0)
    assert constraint.logs() == {"mask_sparsity": 0.0, "multiplier": 0.0}
    assert [step(constraint) for _ in range(3)] == pytest.approx([1.0, 2.0, 3.0])
    close(model, 0.25)
    assert closed_share(model) == pytest.approx(0.25)
    assert step(constraint) == pytest.approx(3.5)
    close(model, TARGET)
    assert step(constraint) == 0
    assert step(constraint) == 0
    close(model, 0.25)
    assert step(constraint) == pytest.approx(0.5)


def test_the_loss_is_the_lagrangian(model: Any) -> None:
    close(model, 0.25)
    constraint = MaskConstraint(model, TARGET, rate=2.0, overlap=0.1)
    step(constraint)
    expected = 0.5 * (TARGET - (1 - open_share(model))) + 0.1 * overlap_penalty(model)
    assert constraint.loss().item() == pytest.approx(expected.item(), rel=1e-6)


def test_its_gradient_closes_masks_and_nothing_else(model: Any) -> None:
    constraint = MaskConstraint(model, TARGET, rate=2.0, overlap=0.0)
    constraint.loss().backward()
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    step(constraint)
    constraint.loss().backward()
    moved = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert moved == {f"{name}.log_phi" for name in sites(model)}
    assert all((site.log_phi.grad > 0).all() for site in sites(model).values())
    assert not constraint._interpolation.multiplier.requires_grad


def test_descent_alone_reaches_the_target(model: Any) -> None:
    """Multiplier and masks against each other, without a task: it rises until enough is closed."""
    constraint = MaskConstraint(model, TARGET, rate=1.0, overlap=0.0)
    choose(model, "auto", freeze_shared=False)
    optimizer = torch.optim.AdamW(parameter_groups(model, 3 * WAY / 40, 0.0), lr=1e-3)
    multipliers = []
    for _ in range(40):
        optimizer.zero_grad()
        constraint.loss().backward()
        optimizer.step()
        multipliers.append(step(constraint))
    first = multipliers.index(0.0)
    assert multipliers[:first] == sorted(multipliers[:first])
    assert first > 2
    assert constraint.logs()["mask_sparsity"] >= TARGET


@pytest.mark.parametrize("rate", [0.02, 9.0])
def test_training_ends_with_the_constraint_met_with_equality(rate: float, model: Any) -> None:
    """However many gates a step closes, by the penalty or, later, by the optimizer's momentum and the overlap."""
    constraint = MaskConstraint(model, TARGET, rate=1.0, overlap=5e-6)
    choose(model, "auto", freeze_shared=False)
    optimizer = torch.optim.AdamW(parameter_groups(model, rate, 0.0), lr=1e-3)
    none, found = SimpleNamespace(), []
    for _ in range(200):
        optimizer.zero_grad()
        constraint.loss().backward()
        optimizer.step()
        constraint.on_step_end(none, none, none, optimizer=optimizer)
        found.append(closed_share(model))
    total = sum(site.log_phi.numel() for site in sites(model).values())
    assert found[-1] == math.ceil(TARGET * total) / total
    assert max(found) == found[-1]
    assert constraint.logs()["multiplier"] == 0


@pytest.mark.parametrize("target", [0.0, 0.3, 0.5, 0.7, 0.999])
@pytest.mark.parametrize("share", [0.0, 0.29, 0.71, 1.0])
def test_the_projection_leaves_no_gate_too_many_closed(share: float, target: float, model: Any) -> None:
    """Those that it opens are the largest of the closed; all others stay as they are."""
    with torch.no_grad():
        draw = torch.Generator().manual_seed(6)
        for site in sites(model).values():
            far = torch.rand(site.log_phi.shape, generator=draw) + 0.01
            is_closed = torch.rand(site.log_phi.shape, generator=draw) < share
            site.log_phi.copy_(torch.where(is_closed, -far, far) - SHIFT)
    before = torch.cat([site.log_phi.detach().flatten() for site in sites(model).values()])
    closed, needed = int((median_gate(before) == 0).sum()), math.ceil(target * len(before))
    missing = project(model, target)
    after = torch.cat([site.log_phi.detach().flatten() for site in sites(model).values()])
    assert missing == pytest.approx(max(0, needed - closed) / len(before))
    assert int((median_gate(after) == 0).sum()) == min(closed, needed)
    moved = after != before
    assert (after[moved] == EDGE).all()
    stay = (median_gate(after) == 0) & ~moved
    if moved.any() and stay.any():
        assert before[moved].min() >= before[stay].max()
    assert project(model, target) == missing


def test_a_gate_on_the_edge_still_learns(model: Any) -> None:
    close(model, 1.0)
    assert all_closed(model)
    project(model, TARGET)
    assert all_closed(model)
    site = next(iter(sites(model).values()))
    gates = site.gates()
    assert gates.max() < 1e-5
    gates.sum().backward()
    assert site.log_phi.grad is not None
    assert ((site.log_phi.grad > 0) == (gates > 0)).all()
    with torch.no_grad():
        site.log_phi[0, 0] = 0
    assert not all_closed(model)


def test_the_multiplier_is_part_of_the_model(model: Any, path: Path) -> None:
    constraint = MaskConstraint(model, TARGET, rate=2.0, overlap=0.0)
    step(constraint)
    state = model.state_dict()
    assert state["model.interpolation.multiplier"].tolist() == [1.0]
    again = load(path)
    again.load_state_dict(state)
    assert MaskConstraint(again, TARGET, rate=2.0, overlap=0.0).logs()["multiplier"] == 1.0


def test_masks_have_a_rate_of_their_own_and_do_not_decay(model: Any) -> None:
    choose(model, "auto", freeze_shared=False)
    others, masks = parameter_groups(model, 0.3, 0.01)
    assert {id(p) for p in masks["params"]} == {id(site.log_phi) for site in sites(model).values()}
    assert (masks["lr"], masks["weight_decay"], others["weight_decay"]) == (0.3, 0.0, 0.01)
    assert "lr" not in others
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(others["params"]) + len(masks["params"]) == len(trained)
    router = interpolation_of(model)
    assert router is not None
    names = {id(p) for p in others["params"]}
    assert names == {id(site.delta) for site in sites(model).values()} | {id(p) for p in router.parameters()}


def test_what_is_chosen(model: Any) -> None:
    with pytest.raises(UsageError, match="--train all"):
        choose(model, "all", freeze_shared=False)
    with pytest.raises(UsageError, match="--freeze-shared"):
        choose(model, "auto", freeze_shared=True)
    count = choose(model, "auto", freeze_shared=False)
    kinds = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert kinds == {"delta", "log_phi", "weight", "bias"}
    linears = [site.linear for site in sites(model).values()]
    assert all(isinstance(linear, nn.Linear) and not linear.weight.requires_grad for linear in linears)
    router = interpolation_of(model)
    assert router is not None
    assert count == (
        sum(linear.weight.numel() + 4 * linear.in_features for linear in linears)
        + sum(p.numel() for p in router.parameters())
    )
