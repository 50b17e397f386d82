"""A second moment whose pairs are shrunk as far as two halves of the windows disagree."""

import pytest
import torch
from torch import Tensor

from moetool.numerics.halved_gram import HalvedGram

SIZE, LENGTH = 12, 5


def gram_of(rows: Tensor, *, parts: int = 1, first: int = 0) -> Tensor:
    gram = HalvedGram(SIZE, LENGTH, first, "cpu")
    for part in rows.split(parts * LENGTH):
        gram.add(part)
    return gram.matrix()


def random(windows: int, seed: int) -> Tensor:
    return torch.randn(windows * LENGTH, SIZE, generator=torch.Generator().manual_seed(seed))


def test_halves_that_agree_leave_the_sum_as_it_is() -> None:
    rows = random(3, 1).unflatten(0, (3, LENGTH)).repeat_interleave(2, 0).flatten(0, 1)
    torch.testing.assert_close(gram_of(rows), rows.T @ rows)


def test_pairs_are_multiplied_by_the_share_of_their_energy_that_halves_have_in_common() -> None:
    scales = torch.logspace(-3, 3, SIZE)
    rows = (random(8, 2) + 0.3 * random(8, 3)[:, :1]) * scales
    windows = rows.unflatten(0, (8, LENGTH)).double()
    one, other = (windows[half].flatten(0, 1) for half in ([0, 3, 5, 6], [1, 2, 4, 7]))
    one, other, whole = one.T @ one, other.T @ other, rows.double().T @ rows.double()
    unit = whole.diagonal().rsqrt()
    a, b = (own * unit * unit[:, None] * (1 - torch.eye(SIZE)) for own in (one, other))
    share = (4 * (a * b).sum() / (a + b).square().sum()).clamp(0, 1)
    expected = torch.where(torch.eye(SIZE).bool(), whole, share * whole)
    torch.testing.assert_close(gram_of(rows).double() / scales, expected / scales, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_nearly_left_out(seed: int) -> None:
    """What is left of pairs lies nearer to none than what was found."""
    rows = random(16, seed)
    found, whole = gram_of(rows), rows.T @ rows
    torch.testing.assert_close(found.diagonal(), whole.diagonal())
    pairs = ~torch.eye(SIZE, dtype=torch.bool)
    assert found[pairs].norm() < 0.6 * whole[pairs].norm()


def test_kinds_that_take_turns_are_in_both_halves() -> None:
    """What differs between kinds is no noise: each is one window, many times."""
    kinds = random(4, 7).unflatten(0, (4, LENGTH))
    rows = kinds.repeat(8, 1, 1).flatten(0, 1)
    torch.testing.assert_close(gram_of(rows), rows.T @ rows)


def test_one_window_and_silence_tell_nothing_of_pairs() -> None:
    rows = random(1, 4)
    torch.testing.assert_close(gram_of(rows), torch.diag((rows.T @ rows).diagonal()))
    assert torch.equal(gram_of(torch.zeros(2 * LENGTH, SIZE)), torch.zeros(SIZE, SIZE))


def test_batches_and_processes_make_no_difference() -> None:
    rows = random(7, 5)
    whole = gram_of(rows, parts=7)
    torch.testing.assert_close(gram_of(rows, parts=2), whole)
    grams = [HalvedGram(SIZE, LENGTH, first, "cpu") for first in (0, 3)]
    halves: list[Tensor] = []
    for gram, part in zip(grams, rows.split([3 * LENGTH, 4 * LENGTH]), strict=True):
        gram.add(part)
        gram.reduce(halves.append)
    for own, other in zip(halves[:2], halves[2:], strict=True):
        own += other
    torch.testing.assert_close(grams[0].matrix(), whole)


def test_parts_of_windows_are_refused() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        gram_of(random(1, 6)[:3])
