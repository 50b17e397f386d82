"""One expert, moved nearer to what it gave."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.architectures import ROLES, Role
from moetool.calibration.routed_tokens import Given
from moetool.compress.refining.expert import FEWEST, Refined, Refinement, StoredMatrix
from moetool.compress.refining.metric import root
from moetool.representations.quantized import Quantized, QuantizedMatrix
from moetool.representations.quantized_low_rank import QuantizedLowRank

HIDDEN, WIDTH, DTYPE = 16, 24, torch.float32
SHAPES: dict[Role, tuple[int, int]] = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
FORMS = {"gate": Quantized(2, 8), "up": QuantizedLowRank(4, 3, 8), "down": QuantizedMatrix(3, 8)}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(matrices: Mapping[Role, Tensor], inputs: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(inputs, matrices["gate"])) * F.linear(inputs, matrices["up"]), matrices["down"])


def given(tokens: int, seed: int) -> Given:
    mixed = normal(tokens, HIDDEN, seed=seed) @ normal(HIDDEN, HIDDEN, seed=99)
    return Given(mixed, 0.5 + normal(tokens, 1, seed=seed + 1).abs())


@pytest.fixture
def original() -> dict[Role, Tensor]:
    return {role: normal(*SHAPES[role], seed=place) / 4 for place, role in enumerate(ROLES)}


@pytest.fixture
def stored(original: dict[Role, Tensor]) -> dict[Role, StoredMatrix]:
    found: dict[Role, StoredMatrix] = {}
    for role, matrix in original.items():
        form = FORMS[role]
        base = normal(*SHAPES[role], seed=7) / 8 if form.uses_base else None
        delta = matrix if base is None else matrix - base
        found[role] = StoredMatrix(form, form.encode(delta, DTYPE), delta, base)
    return found


def cost(
    stored: Mapping[Role, StoredMatrix], refined: Refined, original: Mapping[Role, Tensor], text: Given, metric: Tensor
) -> float:
    """By the definition: ½ eᵀ C Cᵀ e over all tokens."""
    matrices = {role: own.value(refined.tensors[role], DTYPE) for role, own in stored.items()}
    error = (run(matrices, text.inputs) - run(original, text.inputs)) * text.weights
    return 0.5 * float(((error @ metric @ metric.T) * error).sum())


def refine(stored, original, steps: int = 80, seed: int = 0, held: Given | None = None, learnt: int = 512) -> Refined:
    metric = root(torch.diag(torch.linspace(0.1, 2, HIDDEN)))
    task = Refinement(run, original, metric, steps, DTYPE)
    held = held or given(256, seed=50)
    return task.refine(stored, given(learnt, seed=30), held, torch.Generator().manual_seed(seed))


def test_better_on_what_it_did_not_learn_from(stored, original) -> None:
    found, metric = refine(stored, original), root(torch.diag(torch.linspace(0.1, 2, HIDDEN)))
    assert found.is_better
    assert found.after < 0.7 * found.before
    held = given(256, seed=50)
    assert cost(stored, found, original, held, metric) == pytest.approx(found.after, rel=1e-4)
    untouched = Refined({role: own.tensors for role, own in stored.items()}, 0, 0, is_better=False)
    assert cost(stored, untouched, original, held, metric) == pytest.approx(found.before, rel=1e-4)


def test_the_same_from_the_same_seed(stored, original) -> None:
    first, second, other = (refine(stored, original, steps=20, seed=seed, learnt=900) for seed in (0, 0, 1))
    flat = [{f"{role}.{name}": tensor for role, own in found.tensors.items() for name, tensor in own.items()}
            for found in (first, second, other)]  # fmt: skip
    assert all(flat[0][name].equal(flat[1][name]) for name in flat[0])
    assert not all(flat[0][name].equal(flat[2][name]) for name in flat[0])


def test_no_better_means_as_it_was(stored, original) -> None:
    """Codes that already stand for the very matrix cannot be improved; whatever the steps did is thrown away."""
    exact = {role: own.value(own.tensors, DTYPE) for role, own in stored.items()}
    found = refine(stored, exact, steps=5)
    assert not found.is_better
    assert found.before == found.after == pytest.approx(0, abs=1e-9)
    assert all(found.tensors[role] is own.tensors for role, own in stored.items())


@pytest.mark.parametrize(("learnt", "held"), [(FEWEST - 1, 64), (64, FEWEST - 1), (0, 0)])
def test_too_few_tokens_to_tell(stored, original, learnt: int, held: int) -> None:
    found = refine(stored, original, steps=5, held=given(held, seed=50), learnt=learnt)
    assert not found.is_better
    assert all(found.tensors[role] is own.tensors for role, own in stored.items())
