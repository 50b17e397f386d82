import torch

from moetool.reduce.choosing import Fewer, Merged, around_dominant, clustered, highest


def test_of_equals_the_first_are_kept() -> None:
    assert highest(torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0]), Fewer(5, 3)) == [1, 3, 0]


def test_clusters_are_of_average_linkage() -> None:
    """A chain: by single linkage the first three would be one."""
    outputs = torch.tensor([[0.0], [1.0], [2.1], [3.3], [10.0]])
    left = clustered(outputs, torch.tensor([1, 3, 0, 0, 5]), Fewer(5, 3))
    assert left == [Merged((1, 0), (0.75, 0.25)), Merged((2, 3), (0.5, 0.5)), Merged((4,))]


def test_clusters_stay_inside_their_groups() -> None:
    outputs = torch.tensor([[0.0], [5.0], [6.0], [5.5], [5.6], [9.0]])
    left = clustered(outputs, torch.ones(6, dtype=torch.int64), Fewer(6, 4, 2))
    assert [sorted(one.members) for one in left] == [[0], [1, 2], [3, 4], [5]]


def test_experts_join_the_dominant_one_with_the_nearest_logits() -> None:
    logit_rows = torch.tensor([[1.0, 0.1, 0.9, -1.0], [0.0, 1.0, 0.4, 0.1]], dtype=torch.float64)
    left = around_dominant(logit_rows.T @ logit_rows, torch.tensor([6, 8, 2, 0]), Fewer(4, 2))
    assert left == [Merged((0, 2), (0.75, 0.25)), Merged((1, 3), (1.0, 0.0))]
