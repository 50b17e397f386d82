"""The original's predictions as they are noted, and the divergence from them."""

from pathlib import Path

import pytest
import torch

from moetool.calibration.streaming import StreamedModel
from moetool.calibration.sweep import Sweep
from moetool.job.interrupt import Interrupt
from moetool.job.job import Source
from moetool.job.progress import SILENT
from moetool.repair.routing import in_experts_of, routing_target
from moetool.repair.teacher import NotedFile, NotedPredictions, note, predictions
from moetool.runtime.loading import load_model
from moetool.runtime.modules.routers import Routers


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
    note(tmp_path / "noted.safetensors", whole)
    file = NotedFile(tmp_path / "noted.safetensors")
    for found, order in ((file.windows(0, 2), [0, 1]), (file.of([1, 0]), [1, 0])):
        assert (found.routing is not None) == routed
        for own, wanted in zip(found, whole, strict=True):
            assert own is None if wanted is None else own.equal(wanted[order])


@pytest.mark.parametrize("at_once", [4, 1])
def test_layer_by_layer_an_original_predicts_what_it_does_whole(
    at_once: int, tiny_mixtral: Path, tiny_tokens: torch.Tensor, tmp_path: Path
) -> None:
    source, windows, cpu = Source.open(tiny_mixtral), tiny_tokens[:96].view(3, 32), torch.device("cpu")
    model = StreamedModel(source.checkpoint, source.architecture, torch.float32, cpu, experts_at_once=at_once)
    sweep = Sweep(model, windows, tmp_path, kept=torch.float32)
    found = predictions(sweep, 16, routing_target(source, source), SILENT, Interrupt())
    whole = load_model(source.checkpoint, torch.float32, cpu)
    routers = Routers(whole)
    with torch.no_grad(), routers.watched():
        expected = NotedPredictions.of(whole(input_ids=windows, use_cache=False).logits, 16)
    routing = torch.stack([in_experts_of(logits, None) for logits in routers.logits], 1)
    assert found.routing is not None
    assert torch.allclose(found.routing, routing.view_as(found.routing), atol=1e-5)
    assert torch.allclose(found.logs, expected.logs, atol=1e-5)
    assert torch.allclose(found.rest, expected.rest, atol=1e-6)
    assert found.tokens.equal(expected.tokens)
