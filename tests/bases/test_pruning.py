"""Which channels of a base go: how many, which, and the way back."""

import pytest
import torch
from draws import normal64
from torch import Tensor

from moetool.bases.pruning import PruningPlan, kept_channels, plan_pruning, prune_base, spread

HIDDEN, CHANNELS = 4, 9


@pytest.mark.parametrize(
    ("intermediate", "ratio", "static", "dynamic"),
    [
        (14336, 0.1, 716, 717),  # floor(716.8), floor(1433.6) - 716
        (14336, 0.6, 4300, 4301),
        (100, 0.1, 5, 5),
        (10, 0.1, 0, 1),
        (10, 0.05, 0, 0),
        (48, 0.5, 12, 12),
        (7, 0.99, 3, 3),
    ],
)
def test_half_leaves_the_file_and_half_goes_per_batch(
    intermediate: int, ratio: float, static: int, dynamic: int
) -> None:
    assert plan_pruning(intermediate, ratio, "semi-dynamic") == PruningPlan(static, dynamic)
    assert plan_pruning(intermediate, ratio, "static") == PruningPlan(static + dynamic, 0)


def test_a_channel_always_stays() -> None:
    """Whatever the ratio below 1; a base without channels could not be written."""
    for intermediate in range(1, 40):
        for ratio in (0.001, 0.3, 0.5, 0.9, 0.999):
            plan = plan_pruning(intermediate, ratio, "semi-dynamic")
            assert 0 <= plan.static <= plan.static + plan.dynamic < intermediate


def scores(down: Tensor, energy: Tensor) -> list[float]:
    return [float(down[:, j].norm() * energy[j].sqrt()) for j in range(CHANNELS)]


@pytest.mark.parametrize("static", [0, 1, 4, 8])
def test_the_lowest_scores_go(static: int) -> None:
    down, energy = normal64(HIDDEN, CHANNELS, seed=1), normal64(CHANNELS, seed=2).square()
    kept = kept_channels(down, energy, static)
    score = scores(down, energy)
    assert kept.dtype == torch.int64
    assert kept.tolist() == sorted(sorted(range(CHANNELS), key=lambda j: score[j])[static:])


def test_the_score_is_the_lost_output() -> None:
    """`‖down[:, j]‖ ‖h_j‖` is the norm of what the base's output loses; neither factor alone decides."""
    down, h = normal64(HIDDEN, CHANNELS, seed=1), normal64(50, CHANNELS, seed=3)
    down, h = down / down.norm(dim=0), h / h.norm(dim=0)
    down[:, :3] *= torch.tensor([0.01, 100, 0.1])
    h[:, :3] *= torch.tensor([100, 0.01, 0.1])
    lost = [float((h[:, j : j + 1] @ down[:, j : j + 1].T).norm()) for j in range(CHANNELS)]
    assert min(range(CHANNELS), key=lambda j: lost[j]) == 2
    assert kept_channels(down, h.square().sum(0), 1).tolist() == [0, 1, *range(3, CHANNELS)]


def test_equal_scores_go_in_order() -> None:
    kept = kept_channels(torch.ones(HIDDEN, CHANNELS), torch.ones(CHANNELS), 3)
    assert kept.tolist() == list(range(3, CHANNELS))


def test_bf16_bases_are_scored_in_fp64() -> None:
    """Columns whose norms differ by less than a bf16 step, with energies that outweigh the difference."""
    down = torch.full((HIDDEN, CHANNELS), 1.0, dtype=torch.bfloat16)
    energy = torch.ones(CHANNELS, dtype=torch.float64)
    energy[5] = 1 - 1e-9
    assert 5 not in kept_channels(down, energy, 1).tolist()


def base() -> dict:
    return {
        "gate": normal64(CHANNELS, HIDDEN, seed=1),
        "up": normal64(CHANNELS, HIDDEN, seed=2),
        "down": normal64(HIDDEN, CHANNELS, seed=3),
    }


def test_rows_of_gate_and_up_and_columns_of_down() -> None:
    channels = torch.tensor([0, 3, 7])
    pruned = prune_base(base(), channels)
    assert pruned["gate"].equal(base()["gate"][channels])
    assert pruned["up"].equal(base()["up"][channels])
    assert pruned["down"].equal(base()["down"][:, channels])
    assert all(matrix.is_contiguous() for matrix in pruned.values())


@pytest.mark.parametrize("role", ["gate", "up", "down"])
def test_spread_is_the_inverse_of_pruning(role: str) -> None:
    channels = torch.tensor([0, 3, 7])
    dimension = 1 if role == "down" else 0
    pruned = prune_base(base(), channels)[role]
    full = spread(pruned, channels, CHANNELS, dimension)
    assert full.shape == base()[role].shape
    assert full.index_select(dimension, channels).equal(pruned)
    gone = torch.tensor([j for j in range(CHANNELS) if j not in channels.tolist()])
    assert not full.index_select(dimension, gone).any()
    assert full.count_nonzero() == pruned.numel()


def test_nothing_pruned_is_nothing_spread() -> None:
    matrix = base()["gate"]
    assert spread(matrix, torch.arange(CHANNELS), CHANNELS, 0).equal(matrix)
