"""Conditions beside the options that fix the order of a job's sums."""

import torch

from moetool.job.conditions import with_threads


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    with with_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
