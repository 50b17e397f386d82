"""What errors in the output of experts cost."""

import torch

from moetool.calibration.output_gradients import root


def test_root_of_the_second_moment() -> None:
    """C Cᵀ is the moment, with a hundredth of its mean diagonal on the diagonal, also of one that is singular."""
    gradients = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-4
    moment = gradients.T @ gradients / 5
    factor = root(moment.float()).double()
    expected = moment + 0.01 * moment.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(factor @ factor.T, expected, rtol=1e-4, atol=1e-4 * float(moment.diagonal().mean()))


def test_no_gradients_count_all_the_same() -> None:
    assert root(torch.zeros(4, 4)).equal(torch.eye(4))
