import pytest
import torch
from torch import Tensor

from moetool.numerics import deflation, eigen, fortran
from moetool.numerics.deflation import deflated_top_eigh
from moetool.numerics.eigen import top_eigh


def symmetric(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    matrix = torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return (matrix + matrix.T).to(dtype)


@pytest.mark.parametrize(("n", "k"), [(7, 0), (7, 3), (7, 7), (300, 1), (300, 60), (300, 75), (300, 76), (300, 300)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_pairs_equal_the_full_decomposition(n: int, k: int, dtype: torch.dtype, tolerance: float) -> None:
    matrix = symmetric(n, dtype)
    before = matrix.clone()
    values, vectors = top_eigh(matrix, k)
    assert torch.equal(matrix, before)
    assert values.dtype == vectors.dtype == dtype
    assert vectors.shape == (n, k)
    expected = torch.linalg.eigvalsh(matrix.double()).flip(0)[:k]
    scale = n**0.5
    assert torch.allclose(values.double(), expected, rtol=0, atol=tolerance * scale)
    assert torch.allclose((matrix @ vectors).double(), (vectors * values).double(), rtol=0, atol=tolerance * scale)
    identity = torch.eye(k, dtype=dtype)
    assert torch.allclose(vectors.T @ vectors, identity, rtol=0, atol=tolerance * 10)


def test_partial_driver_is_used_and_has_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = symmetric(300)
    calls: list[str] = []

    def spy(name: str, arguments: int) -> fortran.Routine | None:
        calls.append(name)
        return None

    with_lapack = top_eigh(matrix, 30)
    monkeypatch.setattr(eigen, "routine", spy)
    with_torch = top_eigh(matrix, 30)
    assert calls == ["dsyevr"]
    assert torch.allclose(with_lapack[0], with_torch[0], rtol=0, atol=1e-11)
    overlap = (with_lapack[1] * with_torch[1]).sum(0).abs()
    assert torch.allclose(overlap, torch.ones_like(overlap), rtol=0, atol=1e-9)


def test_unknown_routine_is_none() -> None:
    assert fortran.routine("no_such_routine", 3) is None
    assert fortran.routine("dsyevr", 21) is not None


@pytest.mark.parametrize("k", [10, 200])
def test_not_finite_is_an_error(k: int) -> None:
    matrix = symmetric(300)
    matrix[5, 5] = torch.nan
    with pytest.raises(eigen.LinAlgError):
        top_eigh(matrix, k)


def test_shape_and_rank_are_checked() -> None:
    with pytest.raises(ValueError, match="square"):
        top_eigh(torch.zeros(3, 4), 1)
    with pytest.raises(ValueError, match="k=5"):
        top_eigh(torch.zeros(4, 4), 5)


def spread(values: Tensor) -> Tensor:
    q = torch.linalg.qr(symmetric(len(values))).Q
    matrix = (q * values) @ q.T
    return (matrix + matrix.T) / 2


def test_deflation_resolves_what_plain_fp32_cannot() -> None:
    values = torch.cat([torch.tensor([1e9, 3e8, 2e7]), torch.linspace(2, 1, 197)]).double()
    matrix = spread(values)
    found = deflated_top_eigh(matrix, 60)
    assert found is not None
    assert torch.allclose(found[0], values[:60], rtol=1e-5)
    captured = float((found[1] * (matrix @ found[1])).sum() - found[0][:3].sum())
    assert captured == pytest.approx(float(values[3:60].sum()), rel=1e-5)
    single, _ = top_eigh(matrix.float(), 60)
    assert not torch.allclose(single.double(), values[:60], rtol=1e-2)  # the test has teeth


def test_deflation_refuses_what_it_cannot_resolve() -> None:
    values = torch.logspace(0, -9, 200, dtype=torch.float64)  # no gap to deflate at
    assert deflated_top_eigh(spread(values), 10) is not None
    assert deflated_top_eigh(spread(values), 180) is None
    assert deflated_top_eigh(spread(torch.logspace(0, -6, 200, dtype=torch.float64)), 199) is None
    assert deflated_top_eigh(torch.zeros(50, 50, dtype=torch.float64), 5) is None


def test_deflation_refuses_unsettled_outer_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.cat([torch.tensor([1e6]), torch.linspace(2, 1, 99)]).double()
    matrix, found = spread(values), deflation._outer_directions

    def leaking(share: float) -> None:
        leak = share * float(values[60:].sum())
        monkeypatch.setattr(deflation, "_outer_directions", lambda m, k: (*found(m, k)[:2], leak))

    leaking(1e-7)
    assert deflated_top_eigh(matrix, 60) is not None
    leaking(1e-5)
    assert deflated_top_eigh(matrix, 60) is None
