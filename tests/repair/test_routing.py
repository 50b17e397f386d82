"""The original's routing as a target, in the experts that a compressed model has left."""

import pytest
import torch

from moetool.repair.routing import in_experts_of, routing_divergence


@pytest.fixture
def logits() -> list[torch.Tensor]:
    stream = torch.Generator().manual_seed(0)
    return [3 * torch.randn(6, 4, generator=stream) for _ in range(2)]


def test_all_experts_keep_their_probabilities(logits: list[torch.Tensor]) -> None:
    assert torch.allclose(in_experts_of(logits[0], None).exp(), logits[0].softmax(-1))


def test_experts_that_are_left_share_what_went_to_others(logits: list[torch.Tensor]) -> None:
    found = in_experts_of(logits[0], [[0], [3]]).exp()
    kept = logits[0].softmax(-1)[:, [0, 3]]
    assert torch.allclose(found, kept / kept.sum(-1, keepdim=True))


def test_a_merged_expert_has_all_that_went_to_its_parts(logits: list[torch.Tensor]) -> None:
    found = in_experts_of(logits[0], [[1], [0, 2, 3]]).exp()
    whole = logits[0].softmax(-1)
    assert torch.allclose(found, torch.stack([whole[:, 1], whole[:, [0, 2, 3]].sum(-1)], -1))


def test_divergence_is_the_mean_over_tokens_and_layers(logits: list[torch.Tensor]) -> None:
    original = torch.stack([in_experts_of(own, None) for own in logits], 1).unflatten(0, (3, -1))
    assert original.shape == (3, 2, 2, 4)
    assert routing_divergence(logits, original).abs() < 1e-6
    ours = [layer.flip(0).double() for layer in logits]
    parts = []
    for own, layer in zip(ours, logits, strict=True):
        p, q = layer.double().log_softmax(-1), own.log_softmax(-1)
        parts.append((p.exp() * (p - q)).sum(-1))
    assert torch.isclose(routing_divergence(ours, original).double(), torch.cat(parts).mean(), rtol=1e-5)
