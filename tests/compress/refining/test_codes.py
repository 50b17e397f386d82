"""One expert, moved nearer to what it gave."""

from collections.abc import Mapping

import pytest
import torch
from draws import normal
from torch import Tensor
from torch.nn import functional as F

from moetool.architectures import ROLES, Role
from moetool.calibration.output_gradients import root
from moetool.calibration.routed_tokens import RoutedText
from moetool.compress.refining.codes import CodedExpert, MovingCodes, StoredMatrix
from moetool.compress.refining.refinement import FEWEST, Refined, Refinement
from moetool.representations.quantized import Quantized, QuantizedMatrix
from moetool.representations.quantized_low_rank import QuantizedLowRank

HIDDEN, WIDTH, DTYPE, EXPERT = 16, 24, torch.float32, 5
SHAPES: dict[Role, tuple[int, int]] = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
FORMS = {"gate": Quantized(2, 8), "up": QuantizedLowRank(4, 3, 8), "down": QuantizedMatrix(3, 8)}


def run(expert: int, matrices: Mapping[Role, Tensor], inputs: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(inputs, matrices["gate"])) * F.linear(inputs, matrices["up"]), matrices["down"])


def text(tokens: int, seed: int) -> RoutedText:
    mixed = normal(tokens, HIDDEN, seed=seed) @ normal(HIDDEN, HIDDEN, seed=99)
    return RoutedText(range(EXPERT, EXPERT + 1), mixed.bfloat16(), 0.5 + normal(tokens, 1, seed=seed + 1).abs())


@pytest.fixture
def original() -> dict[Role, Tensor]:
    return {role: normal(*SHAPES[role], seed=place) / 4 for place, role in enumerate(ROLES)}


@pytest.fixture
def stored(original: dict[Role, Tensor]) -> CodedExpert:
    found: dict[Role, StoredMatrix] = {}
    for role, matrix in original.items():
        form = FORMS[role]
        base = normal(*SHAPES[role], seed=7) / 8 if form.uses_base else None
        delta = matrix if base is None else matrix - base
        found[role] = StoredMatrix(form, form.encode(delta, DTYPE), delta, base)
    return CodedExpert(found, DTYPE)


def cost(expert: CodedExpert, original: Mapping[Role, Tensor], held: RoutedText, metric: Tensor) -> float:
    """By the definition: ½ eᵀ C Cᵀ e over all tokens."""
    inputs = held.inputs.float()
    error = (run(EXPERT, expert.matrices(EXPERT), inputs) - run(EXPERT, original, inputs)) * held.weights
    return 0.5 * float(((error @ metric @ metric.T) * error).sum())


def refine(
    stored: CodedExpert,
    original: Mapping[Role, Tensor],
    steps: int = 80,
    seed: int = 0,
    held: int = 256,
    learnt: int = 512,
) -> Refined[CodedExpert]:
    metric = root(torch.diag(torch.linspace(0.1, 2, HIDDEN)))
    task = Refinement(run, lambda expert: original, text(learnt, seed=30), text(held, seed=50), metric)
    return task.refine(stored, MovingCodes(stored), steps, torch.Generator().manual_seed(seed))


def test_better_on_what_it_did_not_learn_from(stored, original) -> None:
    found, metric = refine(stored, original), root(torch.diag(torch.linspace(0.1, 2, HIDDEN)))
    assert found.is_better
    assert found.after < 0.7 * found.before
    held = text(256, seed=50)
    assert cost(found.stored, original, held, metric) == pytest.approx(found.after, rel=1e-4)
    assert cost(stored, original, held, metric) == pytest.approx(found.before, rel=1e-4)


def test_the_same_from_the_same_seed(stored, original) -> None:
    found = (refine(stored, original, steps=20, seed=seed, learnt=900) for seed in (0, 0, 1))
    flat = [{f"{role}.{name}": tensor for role, own in one.stored.roles.items() for name, tensor in own.tensors.items()}
            for one in found]  # fmt: skip
    assert all(flat[0][name].equal(flat[1][name]) for name in flat[0])
    assert not all(flat[0][name].equal(flat[2][name]) for name in flat[0])


def test_no_better_means_as_it_was(stored, original) -> None:
    """Codes that already stand for the very matrix cannot be improved; whatever the steps did is thrown away."""
    found = refine(stored, stored.matrices(EXPERT), steps=5)
    assert not found.is_better
    assert found.before == found.after == pytest.approx(0, abs=1e-9)
    assert found.stored is stored


@pytest.mark.parametrize(("learnt", "held"), [(FEWEST - 1, 64), (64, FEWEST - 1), (0, 0)])
def test_too_few_tokens_to_tell(stored, original, learnt: int, held: int) -> None:
    found = refine(stored, original, steps=5, held=held, learnt=learnt)
    assert not found.is_better
    assert found.stored is stored
