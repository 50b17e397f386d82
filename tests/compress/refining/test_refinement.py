"""What all refinement shares: windows held out, and batches of tokens."""

import pytest
import torch

from moetool.compress.refining.refinement import batches, held_out_windows


@pytest.mark.parametrize(("windows", "count"), [(1, 1), (7, 1), (16, 2), (128, 16)])
def test_the_last_eighth_of_the_windows_is_held_out(windows: int, count: int) -> None:
    assert held_out_windows(windows).tolist() == [False] * (windows - count) + [True] * count


def test_every_token_comes_once_before_one_comes_again() -> None:
    drawn = list(batches(10, 4, 4, torch.Generator().manual_seed(0)))
    assert [len(rows) for rows in drawn] == [4, 4, 4, 4]
    assert len({*torch.cat(drawn[:2]).tolist()}) == 8
    assert torch.equal(torch.cat(list(batches(3, 8, 1, torch.Generator()))).sort().values, torch.arange(3))
