"""Labels that a model might have given."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moetool.architectures import find_architecture
from moetool.calibration import labels
from moetool.calibration.labels import drawn_labels
from moetool.calibration.streaming import StreamedModel
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.reader import Checkpoint


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_chances(tokens: int, vocabulary: int) -> Tensor:
    return (3 * torch.randn(tokens, vocabulary, generator=seeded(1))).log_softmax(-1)


def test_labels_come_as_often_as_the_model_says() -> None:
    own, many = some_chances(1, 5), 40_000
    found = torch.bincount(drawn_labels(own.expand(many, -1), seeded(2)), minlength=5) / many
    chances = own[0].exp()
    assert bool(((found - chances).abs() < 4 * (chances * (1 - chances) / many).sqrt()).all())


def test_gradients_on_them_cancel_and_their_squares_are_the_curvature_of_the_divergence() -> None:
    """p - onehot has mean 0 and the second moment diag(p) - p p^T, the Hessian of KL(p || softmax(z)) at p's z."""
    own, many = some_chances(1, 4), 100_000
    drawn = torch.nn.functional.one_hot(drawn_labels(own.expand(many, -1), seeded(3)), 4).double()
    chances = own[0].double().exp()
    scores = chances - drawn
    torch.testing.assert_close(scores.mean(0), torch.zeros(4).double(), rtol=0, atol=0.01)
    curvature = torch.autograd.functional.hessian(
        lambda z: (chances * (chances.log() - z.log_softmax(0))).sum(), own[0].double()
    )
    torch.testing.assert_close(scores.T @ scores / many, curvature, rtol=0, atol=0.01)


def test_what_cannot_be_is_never_drawn() -> None:
    own = torch.full((2000, 6), -torch.inf)
    own[:, 2] = own[:, 4] = math.log(0.5)
    assert drawn_labels(own, seeded(4)).unique().tolist() == [2, 4]


def test_the_ends_of_what_is_drawn_have_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.tensor([[0, 0.5, 0.5, 0]]).log()
    for number, label in ((0.0, 1), (1.0, 2)):
        monkeypatch.setattr(torch, "rand", lambda *size, number=number, **_: torch.full(size, number))
        assert drawn_labels(own, seeded(0)).tolist() == [label]


def test_parts_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    own = some_chances(37, 11)
    whole = drawn_labels(own, seeded(5))
    monkeypatch.setattr(labels, "_AT_ONCE", 44)
    assert drawn_labels(own, seeded(5)).equal(whole)
    assert not drawn_labels(own, seeded(6)).equal(whole)


def test_the_loss_that_is_told_is_that_of_the_true_tokens(
    tiny_mixtral: Path, tiny_tokens: Tensor, tmp_path: Path
) -> None:
    checkpoint, windows = Checkpoint.open(tiny_mixtral), tiny_tokens[:72].view(3, 24)

    def through(seed: int | None) -> tuple[float, Tensor]:
        model: Any = StreamedModel(checkpoint, find_architecture(checkpoint.config), torch.float32, torch.device("cpu"))
        sweep = Sweep(model, windows, tmp_path, label_seed=seed)
        sweep.embed()
        for index in range(model.layer_count):
            with model.layer(index) as layer:
                sweep.forward(index, layer)
        return sweep.head(), sweep.gradient(model.layer_count).read(0, 3)

    (told, true), (also_told, sampled) = through(None), through(0)
    assert told == also_told
    assert not true.equal(sampled)
