"""Experts that no calibration token reached: what they are given of the budget, through the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled

from moetool.job.job import Source

BUSY, UNREACHED, RARE = (0, 1, 2, 3), (4, 5), (6, 7)


@pytest.fixture(scope="module")
def source(make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores of experts 0 to 3 are a, −a, b, −b: two are positive, so 4 and 5, always zero, are never chosen, and 6 and
    7, always small, rarely. All experts differ from each other by as much."""
    model = make_mixtral(num_local_experts=8, num_hidden_layers=2)
    with torch.no_grad():
        for layer in model.model.layers:
            router = layer.mlp.gate.weight
            router[1], router[3], router[4:6] = -router[0], -router[2], 0
            router[6] *= 0.02
            router[7] *= 0.05
    return save_model(model, tmp_path_factory.mktemp("unreached") / "model")


def spent(path: Path, layer: int) -> list[int]:
    """Bytes of every expert's matrices in one layer, without the base."""
    experts = Source.open(path).experts
    totals = [0] * experts.shape.experts
    for expert, role, form in experts.layout(layer).deltas():
        totals[expert] += form.nbytes(experts.shape.matrix(role), experts.dtype)
    return totals


D2MOE = [
    ("--svd", svd, "--sensitivity", sensitivity)
    for svd in ("truncation-aware", "activation-aware", "vanilla")
    for sensitivity in ("channel", "matrix", "none")
]
HYBRID = [("--method", "hybrid", "--group-size", 16, "--sensitivity", kind) for kind in ("channel", "matrix", "none")]


@pytest.mark.parametrize(
    "options",
    sampled(((options,) for options in (*D2MOE, *HYBRID)), [(D2MOE[0],), (D2MOE[4],), (D2MOE[8],), (HYBRID[0],)]),
    ids=lambda options: " ".join(map(str, options[1:])),
)
def test_an_expert_is_given_no_more_than_one_with_more_tokens(
    compress: Callable[..., Any], source: Path, options: tuple[object, ...]
) -> None:
    made = compress(source, "--ratio", 0.5, *options)
    for layer in range(2):
        busy, rare, unreached = (
            [own[expert] for expert in group] for own in [spent(made.path, layer)] for group in (BUSY, RARE, UNREACHED)
        )
        assert max(unreached) <= min(busy + rare)
        assert max(rare) <= min(busy)
        assert max(busy) > 0
