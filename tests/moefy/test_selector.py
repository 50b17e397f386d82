"""The selector of a moefied FFN, on patterns that are known."""

import itertools

import pytest
import torch
from draws import normal
from torch import Tensor
from torch.nn import functional as F

from moetool.moefy.selector import TrainedSelector, expert_scores, needed_tokens, side_by_side, train_selector
from moetool.numerics.seeding import generator

TOKENS, HIDDEN, EXPERTS, CHOSEN = 4000, 16, 8, 2


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    return normal(TOKENS, HIDDEN, seed=0)


@pytest.fixture(scope="module")
def planted(inputs: Tensor) -> Tensor:
    """Scores that are large where a token points to an expert's own direction."""
    return (F.normalize(inputs, dim=-1) @ normal(EXPERTS, HIDDEN, seed=1).T).clamp_min(0).square() + 0.01


def trained(inputs: Tensor, scores: Tensor, epochs: int, seed: int = 0, layer: int = 0) -> TrainedSelector:
    return train_selector(
        inputs, scores, normal(EXPERTS, HIDDEN, seed=2), CHOSEN, seed=seed, layer=layer, epochs=epochs
    )


def choice(selector: TrainedSelector, inputs: Tensor) -> Tensor:
    return (torch.tanh(F.normalize(inputs, dim=-1) @ selector.first.T) @ selector.second.T).topk(CHOSEN).indices


def share(scores: Tensor, chosen: Tensor) -> float:
    return (scores.gather(1, chosen).sum() / scores.sum()).item()


def parts(seed: int = 0, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens to judge by, and tokens to train on."""
    order = torch.randperm(TOKENS, generator=generator(seed, "selector", layer))
    return order[: TOKENS // 10], order[TOKENS // 10 :]


def test_scores_are_squared_distances_per_expert() -> None:
    activations, centre = normal(5, 12, seed=3), normal(12, seed=4)
    expected = torch.zeros(5, 3)
    for token in range(5):
        for neuron in range(12):
            expected[token, neuron // 4] += (activations[token, neuron] - centre[neuron]) ** 2
    torch.testing.assert_close(expert_scores(activations, centre, 3), expected)


def test_needed_tokens_grow_with_the_experts() -> None:
    assert needed_tokens(64) == 4096
    assert needed_tokens(128) == 2 * needed_tokens(64)


def test_a_planted_pattern_is_learnt(inputs: Tensor, planted: Tensor) -> None:
    start, learnt = trained(inputs, planted, 0), trained(inputs, planted, 30)
    assert learnt.best == start.best
    assert learnt.captured > 0.96 * learnt.best
    assert start.captured < 0.5 * learnt.best
    assert learnt.accuracy > 0.8 > 0.5 > start.accuracy
    fresh = normal(500, HIDDEN, seed=9)
    scores = (F.normalize(fresh, dim=-1) @ normal(EXPERTS, HIDDEN, seed=1).T).clamp_min(0).square() + 0.01
    assert share(scores, choice(learnt, fresh)) > 0.95 * share(scores, scores.topk(CHOSEN).indices)


def test_lengths_of_inputs_are_no_matter(inputs: Tensor, planted: Tensor) -> None:
    longer = inputs * normal(TOKENS, 1, seed=5).abs().add(0.1)
    assert trained(longer, planted, 3).captured == pytest.approx(trained(inputs, planted, 3).captured, abs=5e-3)


def test_it_starts_at_the_rows_and_the_identity(inputs: Tensor, planted: Tensor) -> None:
    start = trained(inputs, planted, 0)
    assert start.first.equal(normal(EXPERTS, HIDDEN, seed=2))
    assert start.second.equal(torch.eye(EXPERTS))


def test_it_tells_of_tokens_it_was_not_trained_on(inputs: Tensor, planted: Tensor) -> None:
    selector, (judged, _) = trained(inputs, planted, 4), parts()
    scores, own = planted[judged], choice(selector, inputs[judged])
    best = scores.topk(CHOSEN).indices
    assert selector.captured == pytest.approx(share(scores, own), abs=1e-6)
    assert selector.best == pytest.approx(share(scores, best), abs=1e-6)
    both = (own[:, :, None] == best[:, None]).any(-1).float().mean().item()
    assert selector.accuracy == pytest.approx(both, abs=1e-6)


def test_noise_is_not_learnt(inputs: Tensor) -> None:
    """Learnt by heart, it would capture more of the tokens it saw."""
    noise = normal(TOKENS, EXPERTS, seed=6).square()
    selector, (_, seen) = trained(inputs, noise, 30), parts()
    chance = CHOSEN / EXPERTS
    assert selector.captured == pytest.approx(chance, abs=0.06)
    assert share(noise[seen], choice(selector, inputs[seen])) == pytest.approx(chance, abs=0.06)
    assert selector.best > 2 * chance


def test_tokens_to_judge_by_are_not_trained_on(inputs: Tensor, planted: Tensor) -> None:
    """Other scores there change what is told and which epoch is kept, not what one epoch learns."""
    judged, _ = parts()
    other = planted.clone()
    other[judged] = planted[judged].flip(0)
    straight, turned = trained(inputs, planted, 1), trained(inputs, other, 1)
    assert straight.captured != turned.captured
    learnt = [s for s in (straight, turned) if not s.second.equal(torch.eye(EXPERTS))]
    assert straight in learnt
    assert all(s.first.equal(straight.first) for s in learnt)


def test_the_best_epoch_is_kept(inputs: Tensor, planted: Tensor) -> None:
    """A run of n epochs begins as one of n + 1 does."""
    noisy = planted + 3 * normal(TOKENS, EXPERTS, seed=7).square()
    runs = [trained(inputs[:640], noisy[:640], epochs) for epochs in range(16)]
    for before, after in itertools.pairwise(runs):
        assert after.captured >= before.captured
        assert (after.captured > before.captured) or after.first.equal(before.first)
    assert runs[-1].first.equal(runs[-2].first) or runs[-1].captured > runs[-2].captured
    assert any(after.first.equal(before.first) for before, after in itertools.pairwise(runs))


def test_the_same_seed_gives_the_same_selector(inputs: Tensor, planted: Tensor) -> None:
    first, again, seed, layer = (trained(inputs, planted, 3, *which) for which in ((0, 0), (0, 0), (1, 0), (0, 1)))
    assert first.first.equal(again.first)
    assert first.second.equal(again.second)
    assert not first.first.equal(seed.first)
    assert not first.first.equal(layer.first)


def test_one_expert_that_outweighs_all_does_not_hide_the_others(inputs: Tensor) -> None:
    """Which two others are chosen is learnt from scores relative to the least of them, not from such to the largest."""
    inputs = inputs + 0.5
    scores = (F.normalize(inputs, dim=-1) @ normal(EXPERTS, HIDDEN, seed=1).T).clamp_min(0).square() + 0.01
    scores[:, 0], rows = 30, normal(EXPERTS, HIDDEN, seed=2)
    least, largest = (
        train_selector(inputs, scores, rows, 3, seed=0, layer=0, epochs=15, as_published=published).accuracy
        for published in (False, True)
    )
    assert least > 0.75 > 0.65 > largest


def test_tokens_that_need_no_expert_do_no_harm(inputs: Tensor, planted: Tensor) -> None:
    scores = planted.clone()
    scores[::3] = 0
    selector = trained(inputs, scores, 20)
    assert selector.first.isfinite().all()
    assert selector.captured > 0.9 * selector.best


def test_of_a_network_that_gives_nothing_nothing_is_left_out(inputs: Tensor, planted: Tensor) -> None:
    selector = trained(inputs, torch.zeros_like(planted), 2)
    assert (selector.captured, selector.best) == (1.0, 1.0)
    assert selector.first.isfinite().all()
    assert selector.second.isfinite().all()


def test_experts_that_are_chosen_together_become_neighbours() -> None:
    """Pairs (0, 5), (1, 3), (2, 4), of which each token needs one."""
    pairs = torch.tensor([[0, 5], [1, 3], [2, 4]])
    scores = 0.1 * torch.rand(600, 6, generator=torch.Generator().manual_seed(0))
    scores[torch.arange(600)[:, None], pairs[torch.arange(600) % 3]] += 1
    order = side_by_side(scores, 2)
    assert sorted(order.tolist()) == list(range(6))
    places = order.argsort()
    assert all(abs(int(places[first] - places[second])) == 1 for first, second in pairs.tolist())


@pytest.mark.parametrize("chosen", [2, 6])
def test_experts_without_a_choice_stay_in_their_places(chosen: int) -> None:
    scores = torch.arange(6.0).expand(50, -1)
    assert side_by_side(scores, chosen).tolist() == list(range(6))
