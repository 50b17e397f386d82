"""Base and factors of a layer moved together: towards what the experts gave, on tokens that they did not learn from."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.architectures import Role
from moetool.compress.factors.refining import JointTask, MatrixKey, MovableExperts, outputs
from moetool.compress.factors.routed_text import RoutedText

ROLES: tuple[Role, ...] = ("gate", "up", "down")
EXPERTS, HIDDEN, INTERMEDIATE, RANK = 3, 8, 12, 2


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def run(expert: int, matrices: dict[Role, Tensor], inputs: Tensor) -> Tensor:
    return F.linear(F.silu(inputs @ matrices["gate"].T) * (inputs @ matrices["up"].T), matrices["down"])


def original(expert: int) -> dict[Role, Tensor]:
    sizes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    return {
        role: random(*size, seed=len(role)) / 3 + random(*size, seed=10 * expert + len(role) + 50) / 6
        for role, size in sizes.items()
    }


def cut() -> MovableExperts:
    """Factors of deltas to the mean; the second expert's gate stands alone, and the third's up has no delta."""
    all_ = [original(expert) for expert in range(EXPERTS)]
    bases = {role: sum(own[role] for own in all_) / EXPERTS for role in ROLES}
    factors: dict[MatrixKey, tuple[Tensor, Tensor]] = {}
    for expert, own in enumerate(all_):
        for role in ROLES:
            u, s, v = torch.linalg.svd(own[role] - bases[role])
            factors[role, expert] = u[:, :RANK] * s[:RANK], v[:RANK]
    del factors["gate", 1], factors["up", 2]
    masks = {role: torch.ones_like(base) for role, base in bases.items()}
    return MovableExperts(ROLES, bases, masks, factors, {("gate", 1): all_[1]["gate"]})


def task(tokens: int = 640) -> JointTask:
    weights = random(tokens, EXPERTS, seed=2).softmax(1)
    weights = torch.where(weights >= weights.topk(2).values[:, 1:], weights, 0.0)
    text = RoutedText(random(tokens, HIDDEN, seed=1).bfloat16(), weights)
    metric = torch.diag(torch.linspace(0.1, 2, HIDDEN))
    return JointTask(run, text, outputs(run, original, text), metric, torch.bfloat16)


def moved(steps: int = 40, experts: MovableExperts | None = None) -> tuple[MovableExperts, float, float]:
    found = task().refine(experts or cut(), steps, torch.Generator().manual_seed(0))
    return found.experts, found.before, found.after


def test_the_sum_of_the_experts_outputs_is_what_counts() -> None:
    text = task().text
    expected = sum(
        text.weights[:, expert, None] * run(expert, original(expert), text.inputs.float()) for expert in range(EXPERTS)
    )
    assert torch.allclose(outputs(run, original, text), expected, atol=1e-5)


def test_it_costs_less_on_tokens_that_were_not_learnt_from() -> None:
    _, before, after = moved()
    assert 0 < after < 0.9 * before
    held_out = slice(560, 640)
    assert before == pytest.approx(task().cost(cut(), held_out), rel=1e-6)
    assert after == pytest.approx(task().cost(moved()[0], held_out), rel=1e-6)


def test_what_is_found_is_stored_in_the_model_s_numbers() -> None:
    found, *_ = moved()
    tensors = [*found.bases.values(), *(factor for pair in found.factors.values() for factor in pair)]
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in tensors)
    assert torch.equal(found.whole["gate", 1], original(1)["gate"])
    assert found.factors.keys() == cut().factors.keys()


def test_channels_that_are_gone_stay_away() -> None:
    experts = cut()
    masks = {role: mask.clone() for role, mask in experts.masks.items()}
    for role, mask in masks.items():
        mask[(slice(None), 3) if role == "down" else 3] = 0
    pruned = replace(experts, masks=masks, bases={role: experts.bases[role] * masks[role] for role in ROLES})
    found, before, after = moved(experts=pruned)
    assert after < before
    assert all(bool((found.bases[role][masks[role] == 0] == 0).all()) for role in ROLES)


def test_a_base_that_may_not_move_does_not() -> None:
    experts = cut()
    fixed = replace(experts, masks={role: experts.masks[role] for role in ("gate", "up")})
    found, *_ = moved(experts=fixed)
    assert torch.equal(found.bases["down"], experts.bases["down"])
    assert not torch.equal(found.bases["up"], experts.bases["up"])


def test_what_gets_worse_stays_as_it_was() -> None:
    """The text says one thing to begin with and another in the end."""
    given = task()
    turned = given.target.clone()
    turned[:560] *= -3
    experts = cut()
    found = replace(given, target=turned).refine(experts, 40, torch.Generator().manual_seed(0))
    assert found.experts is experts
    assert found.before == found.after > 0


def test_few_tokens_teach_nothing() -> None:
    experts = cut()
    assert task(tokens=100).refine(experts, 40, torch.Generator()).experts is experts
