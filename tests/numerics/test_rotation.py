"""Rotations: orthogonal, made of Hadamard blocks and signs, and pinned for good."""

import pytest
import torch
from scipy.linalg import hadamard

from moetool.numerics.rotation import Rotation

PINNED = [-1, -1, -1, -1, -1, 1, 1, -1, -1, 1, -1, 1, -1, -1, 1]
WIDTHS = [2, 6, 16, 48, 96, 128]


@pytest.mark.parametrize("width", WIDTHS)
def test_is_hadamard_blocks_after_signs(width: int) -> None:
    turn = Rotation(width, 3)
    matrix = turn(torch.eye(width, dtype=torch.float64)).T
    block = turn.block
    assert width % block == 0
    assert (width // block) % 2
    whole = torch.block_diag(*[torch.from_numpy(hadamard(block)).double() / block**0.5] * (width // block))
    signs = whole.T @ matrix
    assert signs.diagonal().abs().sub(1).abs().max() < 1e-12
    torch.testing.assert_close(whole * signs.diagonal(), matrix)
    assert width < 16 or 0 < (signs.diagonal() > 0).sum() < width


@pytest.mark.parametrize("width", WIDTHS)
def test_products_stay_what_they_were(width: int) -> None:
    stream = torch.Generator().manual_seed(0)
    weight, inputs = (torch.randn(5, width, generator=stream, dtype=torch.float64) for _ in range(2))
    turn = Rotation(width, 1)
    torch.testing.assert_close(turn(inputs) @ turn(weight).T, inputs @ weight.T)
    torch.testing.assert_close(turn.back(turn(weight)), weight)
    torch.testing.assert_close(turn.gram(inputs.T @ inputs), turn(inputs).T @ turn(inputs))
    assert turn(inputs.view(5, 1, width)).shape == (5, 1, width)


def test_signs_never_change() -> None:
    """Files rely on them."""
    signs = [int(value) for value in Rotation(15, 7)(torch.ones(15)).tolist()]
    assert signs == PINNED
    assert not Rotation(15, 8)(torch.ones(15)).equal(Rotation(15, 7)(torch.ones(15)))
