"""Routers at their start: the right size, blind to what all tokens share, and turned towards their own text."""

import pytest
import torch
from draws import normal64
from torch import Tensor

from moetool.numerics.seeding import linear_std
from moetool.upcycle.router import centred, centroid_router, decorrelated, random_router


def test_the_default_is_that_of_a_fresh_linear_layer() -> None:
    """U(±1/√d) has standard deviation 1/√(3d)."""
    for hidden in (3, 32, 4096):
        assert linear_std(hidden) ** 2 * 3 * hidden == pytest.approx(1, rel=1e-12)
    rows = random_router(64, 1024, linear_std(1024), seed=0, layer=0)
    assert rows.shape == (64, 1024)
    assert rows.dtype == torch.float32
    assert rows.std().item() == pytest.approx(linear_std(1024), rel=0.01)
    assert rows.abs().max().item() <= 1024**-0.5 * (1 + 1e-6)


def test_every_layer_and_seed_has_its_own_router() -> None:
    found = [random_router(4, 8, 1.0, seed, layer) for seed, layer in ((0, 0), (0, 1), (1, 0))]
    assert not any(one.equal(other) for i, one in enumerate(found) for other in found[:i])
    assert random_router(4, 8, 1.0, 0, 1).equal(found[1])
    assert random_router(4, 8, 2.0, 0, 1).equal(2 * found[1])


def test_centred_rows_do_not_see_the_mean_and_keep_the_rest() -> None:
    rows, mean = normal64(6, 33), normal64(33, seed=1) + 5
    found = centred(rows, mean)
    assert (found @ mean).abs().max() < 1e-12 * mean.norm()
    others = torch.linalg.qr(torch.cat([mean[:, None], normal64(33, 5, seed=2)], dim=1)).Q[:, 1:]  # orthogonal to it
    torch.testing.assert_close(found @ others, rows @ others, rtol=0, atol=1e-12)
    torch.testing.assert_close(centred(found, mean), found, rtol=0, atol=1e-13)
    torch.testing.assert_close(centred(rows, -100 * mean), found, rtol=0, atol=1e-12)


def test_centring_without_a_mean_changes_nothing() -> None:
    rows = normal64(6, 33)
    assert centred(rows, torch.zeros(33)).equal(rows)
    assert centred(rows.float(), normal64(33).float()).dtype == torch.float32


def clusters(experts: int, hidden: int = 24, tokens: int = 500) -> Tensor:
    """`[experts, tokens, hidden]`: each expert's text has its own mean, on top of a large one that all share."""
    offsets = 2 * normal64(experts, 1, hidden, seed=3) + 7 * normal64(hidden, seed=4)
    return offsets + normal64(experts, tokens, hidden, seed=5) * (0.2 + normal64(hidden, seed=6).abs())


@pytest.mark.parametrize("experts", [2, 3, 5])
def test_centroid_routers(experts: int) -> None:
    text = clusters(experts)
    rows = text.flatten(0, 1)
    mean, covariance = rows.mean(0), rows.T.cov(correction=0)
    router = centroid_router(text.mean(1), mean, covariance)
    assert router.dtype == torch.float32
    logits = rows @ router.double().T
    # As one number over all experts, the logits vary by 1; none has a head start on the average token.
    assert logits.var(0, correction=0).mean().item() == pytest.approx(1, rel=1e-6)
    assert logits.mean(0).abs().max() < 1e-5
    assert (mean @ router.double().T).abs().max() < 1e-5
    # Every text goes to its own expert more than to any other.
    own = (text @ router.double().T).argmax(-1)
    assert [(own[e] == e).double().mean() > 0.8 for e in range(experts)] == [True] * experts


def test_two_centroids_give_opposite_rows_along_their_difference() -> None:
    text = clusters(2)
    rows = text.flatten(0, 1)
    router = centroid_router(text.mean(1), rows.mean(0), rows.T.cov(correction=0)).double()
    torch.testing.assert_close(router[0], -router[1], rtol=1e-6, atol=1e-9)
    direction = centred((text[0].mean(0) - text[1].mean(0))[None], rows.mean(0))[0]
    assert torch.cosine_similarity(router[0], direction, dim=0).item() == pytest.approx(1, abs=1e-6)


def test_texts_that_do_not_differ_give_finite_rows() -> None:
    router = centroid_router(torch.ones(2, 8).double(), torch.ones(8).double(), torch.eye(8).double())
    assert router.isfinite().all()


def spread(hidden: int) -> Tensor:
    """A covariance with some large and some small directions."""
    basis = torch.linalg.qr(normal64(hidden, hidden, seed=7)).Q
    return basis @ torch.diag(10.0 ** torch.linspace(-2, 1, hidden, dtype=torch.float64)) @ basis.T


def test_decorrelated_logits_vary_equally_and_independently() -> None:
    covariance, rows = spread(24), normal64(6, 24)
    found = decorrelated(rows, covariance)
    before, after = rows @ covariance @ rows.T, found @ covariance @ found.T
    variance = before.diagonal().mean()
    torch.testing.assert_close(after, variance * torch.eye(6).double(), rtol=1e-9, atol=1e-9)
    # They are only mixed among themselves: what all were blind to, they are blind to.
    assert torch.linalg.matrix_rank(torch.cat([rows, found])) == 6
    # As little as can be: the mix is symmetric and positive, and of what is independent already there is none.
    mix = torch.linalg.lstsq(rows.T, found.T).solution.T
    torch.testing.assert_close(mix, mix.T, rtol=1e-9, atol=1e-9)
    assert torch.linalg.eigvalsh(mix).min() > 0
    torch.testing.assert_close(decorrelated(found, covariance), found, rtol=1e-9, atol=1e-9)


def test_rows_that_cannot_be_independent_only_vary_equally() -> None:
    covariance, rows = spread(8), normal64(20, 8)
    found = decorrelated(rows, covariance)
    before, after = ((one @ covariance @ one.T).diagonal() for one in (rows, found))
    torch.testing.assert_close(after, before.mean().expand(20), rtol=1e-9, atol=0)
    torch.testing.assert_close(torch.cosine_similarity(found, rows), torch.ones(20).double(), rtol=1e-12, atol=0)
    assert decorrelated(rows.float(), covariance).dtype == torch.float32
