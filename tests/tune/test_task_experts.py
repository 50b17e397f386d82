"""Which experts a task uses, against counting by hand (ESFT, arXiv:2407.01906)."""

import pytest
import torch
from torch import Tensor

from moetool.tune.task_experts import most_chosen


@pytest.mark.parametrize(
    ("counts", "share", "marked"),
    [
        ([5, 3, 2, 0], 0.5, [0]),
        ([5, 3, 2, 0], 0.51, [0, 1]),
        ([5, 3, 2, 0], 1.0, [0, 1, 2]),
        ([1, 4, 4, 1], 0.2, [1]),
        ([1, 4, 4, 1], 0.8, [1, 2]),
        ([0, 0, 0], 0.2, [0]),
    ],
)
def test_the_fewest_that_reach_the_share(counts: list[int], share: float, marked: list[int]) -> None:
    assert most_chosen(torch.tensor(counts), share).nonzero().flatten().tolist() == marked


def test_no_fewer_would_do() -> None:
    counts: Tensor = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(0))
    for share in (0.1, 0.37, 0.9):
        marked = most_chosen(counts, share)
        assert counts[marked].sum() >= share * counts.sum()
        assert counts[marked].sum() - counts[marked].min() < share * counts.sum()
        assert counts[marked].min() >= counts[~marked].max()
