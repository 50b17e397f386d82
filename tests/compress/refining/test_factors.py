"""Base and factors of a layer moved together: towards what the experts gave, on tokens that they did not learn from."""

from dataclasses import replace

import pytest
import torch
from draws import normal
from torch import Tensor
from torch.nn import functional as F

from moetool.architectures import Role
from moetool.calibration.routed_tokens import RoutedText
from moetool.compress.refining.factors import FactoredExperts, MatrixKey, MovingFactors
from moetool.compress.refining.refinement import Refined, Refinement
from moetool.representations.low_rank import LowRank
from moetool.representations.quantized_low_rank import QuantizedLowRank

ROLES: tuple[Role, ...] = ("gate", "up", "down")
EXPERTS, HIDDEN, INTERMEDIATE, RANK = 3, 8, 12, 2


def run(expert: int, matrices: dict[Role, Tensor], inputs: Tensor) -> Tensor:
    return F.linear(F.silu(inputs @ matrices["gate"].T) * (inputs @ matrices["up"].T), matrices["down"])


def original(expert: int) -> dict[Role, Tensor]:
    sizes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    return {
        role: normal(*size, seed=len(role)) / 3 + normal(*size, seed=10 * expert + len(role) + 50) / 6
        for role, size in sizes.items()
    }


def cut() -> FactoredExperts:
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
    whole, forms = {("gate", 1): all_[1]["gate"]}, dict.fromkeys(factors, LowRank(RANK))
    return FactoredExperts(ROLES, bases, masks, factors, whole, {}, forms, torch.bfloat16)


def coded() -> FactoredExperts:
    """The same with factors in codes of 8 bits, and a delta in codes where there was none."""
    experts, form = cut(), QuantizedLowRank(RANK, 8, 4)
    delta = original(2)["up"] - experts.bases["up"]
    return replace(experts, deltas={("up", 2): delta}, forms=dict.fromkeys(experts.factors, form)).rounded()


def task(tokens: int = 640) -> Refinement:
    weights = normal(tokens, EXPERTS, seed=2).softmax(1)
    weights = torch.where(weights >= weights.topk(2).values[:, 1:], weights, 0.0)
    text = RoutedText(range(EXPERTS), normal(tokens, HIDDEN, seed=1).bfloat16(), weights)
    learnt = tokens - tokens // 8
    return Refinement(run, original, text[:learnt], text[learnt:], torch.diag(torch.linspace(0.1, 2, HIDDEN)))


def moved(experts: FactoredExperts | None = None, tokens: int = 640) -> Refined[FactoredExperts]:
    given = experts or cut()
    return task(tokens).refine(given, MovingFactors(given), 40, torch.Generator().manual_seed(0))


def loss(experts: FactoredExperts) -> float:
    """By the definition, on the tokens held out."""
    own = task()
    error = own.outputs(experts.matrices, own.held_out) - own.outputs(original, own.held_out)
    return 0.5 * float((error @ own.metric).square().sum())


def test_the_sum_of_the_experts_outputs_is_what_counts() -> None:
    text = task().learnt
    expected = sum(
        text.weights[:, expert, None] * run(expert, original(expert), text.inputs.float()) for expert in range(EXPERTS)
    )
    assert torch.allclose(task().outputs(original, text), expected, atol=1e-5)


def test_it_costs_less_on_tokens_that_were_not_learnt_from() -> None:
    found = moved()
    assert found.is_better
    assert 0 < found.after < 0.9 * found.before
    assert found.before == pytest.approx(loss(cut()), rel=1e-6)
    assert found.after == pytest.approx(loss(found.stored), rel=1e-6)


def test_what_is_found_is_stored_in_the_model_s_numbers() -> None:
    found = moved().stored
    tensors = [*found.bases.values(), *(factor for pair in found.factors.values() for factor in pair)]
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in tensors)
    assert torch.equal(found.whole["gate", 1], original(1)["gate"])
    assert found.factors.keys() == cut().factors.keys()


def test_codes_are_found_anew() -> None:
    given = coded()
    found = moved(given)
    assert found.is_better
    assert 0 < found.after < 0.9 * found.before
    assert found.after == pytest.approx(loss(found.stored), rel=1e-6)
    assert found.stored.deltas == given.deltas
    for key, (u, v) in found.stored.factors.items():
        form = found.stored.forms[key]
        codes = form.encode_factors(u, v, torch.bfloat16)
        assert codes["u.codes"].dtype == codes["v.codes"].dtype == torch.uint8
        again = form.decode_factors(codes, (len(u), v.shape[1]), torch.bfloat16)
        assert not torch.equal(u, given.factors[key][0])
        torch.testing.assert_close(again, (u, v), rtol=0.01, atol=0.01)


def test_channels_that_are_gone_stay_away() -> None:
    experts = cut()
    masks = {role: mask.clone() for role, mask in experts.masks.items()}
    for role, mask in masks.items():
        mask[(slice(None), 3) if role == "down" else 3] = 0
    pruned = replace(experts, masks=masks, bases={role: experts.bases[role] * masks[role] for role in ROLES})
    found = moved(pruned)
    assert found.is_better
    assert all(bool((found.stored.bases[role][masks[role] == 0] == 0).all()) for role in ROLES)


def test_a_base_that_may_not_move_does_not() -> None:
    experts = cut()
    fixed = replace(experts, masks={role: experts.masks[role] for role in ("gate", "up")})
    found = moved(fixed).stored
    assert torch.equal(found.bases["down"], experts.bases["down"])
    assert not torch.equal(found.bases["up"], experts.bases["up"])


class Contradicted(Refinement):
    """The tokens that are learnt from say the opposite of those held out."""

    def outputs(self, matrices, text: RoutedText) -> Tensor:
        found = super().outputs(matrices, text)
        return -3 * found if text is self.learnt else found


def test_what_gets_worse_stays_as_it_was() -> None:
    given, experts = task(), cut()
    contradicted = Contradicted(run, original, given.learnt, given.held_out, given.metric)
    found = contradicted.refine(experts, MovingFactors(experts), 40, torch.Generator().manual_seed(0))
    assert found.stored is experts
    assert found.before == found.after > 0


def test_few_tokens_teach_nothing() -> None:
    experts = cut()
    assert moved(experts, tokens=100).stored is experts


def test_nothing_to_move() -> None:
    experts = replace(cut(), factors={})
    found = moved(experts)
    assert found.stored is experts
    assert not found.is_better
