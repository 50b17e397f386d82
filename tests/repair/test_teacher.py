"""The original's predictions as they are noted, and the divergence from them."""

from pathlib import Path

import pytest
import torch

from moetool.repair.teacher import NotedFile, NotedPredictions, note


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(0)
    ours, theirs = (3 * torch.randn(2, 5, 40, generator=stream, dtype=torch.float64) for _ in range(2))
    return ours, theirs


def whole(original: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    p, q = original.log_softmax(-1), model.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def test_all_tokens_give_the_divergence_itself(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    original, model = logits
    found = NotedPredictions.of(original, 64).divergence(model)
    assert torch.allclose(found.double(), whole(original, model), rtol=1e-5)


def test_the_others_are_one_token(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    original, model = logits
    noted = NotedPredictions.of(original, 7)
    p, q = (each.softmax(-1).gather(-1, noted.tokens.long()) for each in logits)
    p, q = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in (p, q))
    expected = (p * (p / q).log()).sum(-1)
    found = noted.divergence(model).double()
    assert torch.allclose(found, expected, rtol=1e-4)
    assert (found <= whole(original, model) + 1e-6).all()
    assert noted.divergence(original).abs().max() < 1e-6


@pytest.mark.parametrize("routed", [False, True])
def test_windows_are_read_as_they_were_noted(
    routed: bool, logits: tuple[torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    original, _ = logits
    routing = torch.randn(2, 5, 3, 8) if routed else None
    whole = NotedPredictions.of(original, 4, routing)
    parts = [NotedPredictions(*(None if own is None else own[place] for own in whole)) for place in ([0], [1])]
    note(tmp_path / "noted.safetensors", iter(parts))
    file = NotedFile(tmp_path / "noted.safetensors")
    for found, order in ((file.windows(0, 2), [0, 1]), (file.of([1, 0]), [1, 0])):
        assert (found.routing is not None) == routed
        for own, wanted in zip(found, whole, strict=True):
            assert own is None if wanted is None else own.equal(wanted[order])
