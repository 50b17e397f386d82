from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moetool.numerics import whitened
from moetool.numerics.factorize import Factorization, balancing_powers, factorize, spectrum, truncate, whitened_error
from moetool.numerics.output_norm import ChannelNorm
from moetool.representations import Measured
from moetool.representations.quantized_low_rank import QuantizedLowRank

Build = Callable[..., Tensor]
SHAPES = [(96, 160), (160, 96), (128, 128)]


def optimum(delta: Tensor, root: Tensor | None = None) -> Tensor:
    """Optimal error of every rank 0..r in the norm of delta @ root: [r + 1] fp64."""
    wide = delta.double() if root is None else delta.double() @ root
    squares = torch.linalg.svdvals(wide).square()
    return torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)]).sqrt()


def error(delta: Tensor, u: Tensor, v: Tensor, root: Tensor | None = None) -> float:
    difference = delta.double() - u.double() @ v.double()
    return float(torch.linalg.norm(difference if root is None else difference @ root))


@pytest.mark.parametrize("condition", [1e4, 1e8, 1e12])
def test_projection_equals_the_form_with_the_inverse(make_delta: Build, make_gram: Build, condition: float) -> None:
    delta, gram = make_delta(40, 60).double(), make_gram(60, condition)
    root = torch.linalg.cholesky(gram)
    left, values, right = torch.linalg.svd(delta @ root, full_matrices=False)
    projected = left[:, :15] @ (left[:, :15].T @ delta)
    inverted = (left[:, :15] * values[:15]) @ right[:15] @ torch.linalg.inv(root)
    scale = torch.linalg.norm(delta @ root)
    assert torch.linalg.norm((projected - inverted) @ root) <= 1e-13 * scale


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8])
def test_error_is_optimal(
    make_delta: Build, make_gram: Build, rows: int, columns: int, condition: float, share: float
) -> None:
    delta, gram = make_delta(rows, columns), make_gram(columns, condition)
    root = torch.linalg.cholesky(gram)
    best = optimum(delta, root)
    k = int(share * min(rows, columns))
    for rank in (k, None):  # through fp32 where accepted, and in fp64
        found = factorize(delta, gram=gram, rank=rank)
        u, v = truncate(delta, found, k, torch.float32)
        assert (u.shape, v.shape) == ((rows, k), (k, columns))
        assert u.dtype == v.dtype == torch.float32
        assert best[k] * (1 - 1e-9) <= error(delta, u, v, root) <= best[k] * (1 + 1e-5)
        assert found.energy == pytest.approx(float(best[0] ** 2), rel=1e-5)
        predicted = max(found.energy - float(found.spectrum[:k].sum()), 0.0) ** 0.5
        assert predicted == pytest.approx(float(best[k]), rel=1e-2)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_full_spectrum_and_basis(make_delta: Build, make_gram: Build, rows: int, columns: int) -> None:
    delta, gram = make_delta(rows, columns), make_gram(columns, 1e6)
    found = factorize(delta, gram=gram)
    root = torch.linalg.cholesky(gram)
    values = torch.linalg.svdvals(delta.double() @ root).square()
    assert found.spectrum.dtype == torch.float64
    assert torch.allclose(found.spectrum, values, rtol=1e-6, atol=1e-13 * float(values[0]))
    assert found.basis.dtype == torch.float32
    assert found.side == ("left" if rows <= columns else "right")
    image = found.basis.double() if found.side == "left" else delta.double() @ found.basis.double()
    assert torch.allclose(image.T @ image, torch.eye(min(rows, columns)).double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("whitened_by", ["gram", "nothing"])
def test_full_rank_gives_the_delta_back(
    make_delta: Build, make_gram: Build, rows: int, columns: int, whitened_by: str
) -> None:
    delta = make_delta(rows, columns)
    found = factorize(delta, gram=make_gram(columns, 1e6) if whitened_by == "gram" else None)
    u, v = truncate(delta, found, min(rows, columns), torch.float32)
    assert error(delta, u, v) <= 1e-6 * float(torch.linalg.norm(delta))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_ranks_are_nested(make_delta: Build, make_gram: Build, rows: int, columns: int) -> None:
    delta, gram = make_delta(rows, columns), make_gram(columns, 1e6)
    everything = factorize(delta, gram=gram)
    for k in (1, 10, 40):
        u, v = truncate(delta, everything, k, torch.float64)
        direct_u, direct_v = truncate(delta, factorize(delta, gram=gram, rank=k), k, torch.float64)
        assert torch.linalg.norm(u @ v - direct_u @ direct_v) <= 1e-3 * torch.linalg.norm(delta)
        metric = error(delta, u, v, torch.linalg.cholesky(gram))
        assert error(delta, direct_u, direct_v, torch.linalg.cholesky(gram)) == pytest.approx(metric, rel=1e-6)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("rank", [24, None])
def test_without_whitening_it_is_eckart_young(make_delta: Build, rows: int, columns: int, rank: int | None) -> None:
    delta = make_delta(rows, columns)
    identity = torch.eye(columns, dtype=torch.float64)
    best = optimum(delta)
    for gram in (None, identity):
        found = factorize(delta, gram=gram, rank=rank)
        u, v = truncate(delta, found, 24, torch.float32)
        assert error(delta, u, v) == pytest.approx(float(best[24]), rel=1e-6)
        assert torch.allclose(found.spectrum.sqrt(), torch.linalg.svdvals(delta.double())[: rank or None], rtol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("rank", [19, None])
def test_output_gram_gives_the_same(
    make_delta: Build, make_gram: Build, rows: int, columns: int, rank: int | None
) -> None:
    delta, gram = make_delta(rows, columns), make_gram(columns, 1e8)
    wide = delta.double()
    output = factorize(delta, output_gram=wide @ gram @ wide.T, rank=rank)
    assert output.side == "left"
    root = torch.linalg.cholesky(gram)
    u, v = truncate(delta, output, 19, torch.float32)
    assert error(delta, u, v, root) <= float(optimum(delta, root)[19]) * (1 + 1e-5)
    inner = factorize(delta, gram=gram, rank=rank)
    assert output.energy == pytest.approx(inner.energy, rel=1e-6)
    assert torch.allclose(output.spectrum[:19], inner.spectrum[:19], rtol=1e-3)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("condition", [1e4, 1e8, 1e12])
def test_bf16_refit_beats_rounding_both_factors(
    make_delta: Build, make_gram: Build, rows: int, columns: int, condition: float
) -> None:
    delta, gram = make_delta(rows, columns), make_gram(columns, condition)
    found = factorize(delta, gram=gram)
    for k in (5, 20, 60):
        exact_u, exact_v = truncate(delta, found, k, torch.float64)
        u, v = truncate(delta, found, k, torch.bfloat16)
        assert u.dtype == v.dtype == torch.bfloat16
        powers = (u.double().norm(dim=0) / exact_u.norm(dim=0)).log2().round().exp2()  # where balance is a close call
        assert torch.allclose(u.double(), exact_u * powers, rtol=2**-8 * 1.01, atol=1e-6)
        # V is rounded either way; the refit is judged before that, in the norm that it minimises.
        assert error(delta, u, _refit(delta, u)) <= error(delta, u, exact_v)
        assert error(delta, u, v) <= error(delta, u, exact_v.bfloat16()) * (1 + 1e-6)
        assert error(delta, u, v) <= error(delta, u, _refit(delta, u).bfloat16()) * (1 + 1e-3)


def _refit(delta: Tensor, u: Tensor) -> Tensor:
    solution: Tensor = torch.linalg.lstsq(u.double(), delta.double()).solution
    return solution


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("rank", [24, 90, None])
def test_rank_deficient_gram(make_delta: Build, rows: int, columns: int, rank: int | None) -> None:
    delta = make_delta(rows, columns)
    tokens = torch.randn(columns // 8, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    gram = tokens.T @ tokens
    found = factorize(delta, gram=gram, rank=rank)
    assert torch.isfinite(found.basis).all()
    k = len(found.spectrum)
    u, v = truncate(delta, found, k, torch.float32)
    # More directions than the activations span: nothing that was seen is missed.
    assert error(delta, u, v, tokens.T) <= 1e-5 * float(torch.linalg.norm(delta.double() @ tokens.T))
    assert torch.linalg.norm(u @ v) <= torch.linalg.norm(delta) * (1 + 1e-6)
    if k == min(rows, columns):  # and the unseen directions were filled from the delta itself
        assert error(delta, u, v) <= 1e-5 * float(torch.linalg.norm(delta))


def test_unseen_directions_are_filled_by_importance(make_delta: Build) -> None:
    delta = make_delta(160, 96, beta=1.0)
    token = torch.zeros(96, 96, dtype=torch.float64)
    token[0, 0] = 1.0  # the activations say something about one direction only
    u, v = truncate(delta, factorize(delta, gram=token, rank=20), 20, torch.float32)
    assert error(delta, u, v) <= float(optimum(delta)[19]) * (1 + 1e-5)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("rank", [24, None])
@pytest.mark.parametrize("empty", ["gram", "delta"])
def test_zero_input(make_delta: Build, rows: int, columns: int, rank: int | None, empty: str) -> None:
    delta = make_delta(rows, columns) if empty == "gram" else torch.zeros(rows, columns)
    gram = torch.zeros(columns, columns).double() if empty == "gram" else torch.eye(columns).double()
    found = factorize(delta, gram=gram, rank=rank)
    assert found.energy == 0
    assert not found.spectrum.any()
    assert torch.isfinite(found.basis).all()
    u, v = truncate(delta, found, 10, torch.bfloat16)
    assert torch.isfinite(u).all()
    assert torch.isfinite(v).all()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_delta_of_low_rank_is_exact(make_delta: Build, make_gram: Build, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(8)
    delta = torch.randn(rows, 6, generator=generator) @ torch.randn(6, columns, generator=generator)
    for rank in (6, 12, None):
        found = factorize(delta, gram=make_gram(columns, 1e6), rank=rank)
        assert torch.isfinite(found.basis).all()
        u, v = truncate(delta, found, len(found.spectrum), torch.float32)
        assert error(delta, u, v) <= 1e-5 * float(torch.linalg.norm(delta))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_extreme_conditioning_never_enlarges_the_delta(
    make_delta: Build, make_gram: Build, rows: int, columns: int
) -> None:
    delta, gram = make_delta(rows, columns), make_gram(columns, 1e12)
    root = torch.linalg.cholesky(gram)
    best = optimum(delta, root)
    for k in (5, 20, 48, 67):
        u, v = truncate(delta, factorize(delta, gram=gram, rank=k), k, torch.float32)
        assert error(delta, u, v, root) <= best[k] * (1 + 1e-3)
        assert torch.linalg.norm(u.double() @ v.double()) <= torch.linalg.norm(delta.double()) * (1 + 1e-6)


def test_whatever_fp32_accepts_is_accurate(
    make_delta: Build, make_gram: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[bool] = []
    original = whitened.resolved

    def watched(product: Tensor, k: int, scale: float, resolution: float) -> tuple[Tensor, Tensor] | None:
        found = original(product, k, scale, resolution)
        outcomes.append(found is not None)
        return found

    monkeypatch.setattr(whitened, "resolved", watched)
    for rows, columns in SHAPES[:2]:
        for beta in (0.05, 0.8):
            delta = make_delta(rows, columns, beta)
            for condition in (1e3, 1e6, 1e10, 1e14):
                gram = make_gram(columns, condition, base=min(condition, 1e8))
                root = torch.linalg.cholesky(gram)
                best = optimum(delta, root)
                for k in (2, 10, 48, 90):
                    u, v = truncate(delta, factorize(delta, gram=gram, rank=k), k, torch.float64)
                    if outcomes[-1]:
                        assert error(delta, u, v, root) <= best[k] * (1 + 5e-4)
    assert True in outcomes
    assert False in outcomes


@pytest.mark.parametrize(("rows", "columns"), [(700, 320), (320, 700)])
@pytest.mark.parametrize("rank", [60, 200, None])
def test_equal_input_gives_equal_bytes(
    make_delta: Build, make_gram: Build, rows: int, columns: int, rank: int | None
) -> None:
    delta, gram = make_delta(rows, columns), make_gram(columns, 1e8)

    def run() -> tuple[Factorization, Tensor, Tensor]:
        found = factorize(delta.clone(), gram=gram.clone(), rank=rank)
        return found, *truncate(delta.clone(), found, 60, torch.bfloat16)

    (first, u1, v1), (second, u2, v2) = run(), run()
    assert torch.equal(first.spectrum, second.spectrum)
    assert torch.equal(first.basis, second.basis)
    assert torch.equal(u1, u2)
    assert torch.equal(v1, v2)
    largest = first.basis.gather(0, first.basis.abs().argmax(0, keepdim=True))
    assert (largest > 0).all()


def test_input_is_left_alone(make_delta: Build, make_gram: Build) -> None:
    delta, gram = make_delta(160, 96), make_gram(96, 1e6)
    copies = delta.clone(), gram.clone()
    found = factorize(delta, gram=gram, rank=20)
    truncate(delta, found, 20, torch.float32)
    truncate(delta, factorize(delta, output_gram=delta.double() @ gram @ delta.double().T), 20, torch.float32)
    assert torch.equal(delta, copies[0])
    assert torch.equal(gram, copies[1])


def test_rank_zero_is_empty(make_delta: Build) -> None:
    delta = make_delta(20, 30)
    for rank in (0, None):
        u, v = truncate(delta, factorize(delta, rank=rank), 0, torch.bfloat16)
        assert (u.shape, v.shape) == ((20, 0), (0, 30))
    assert whitened_error(delta, u, v) == pytest.approx(float(delta.double().square().sum()), rel=1e-12)


def test_whitened_error_is_the_trace(make_delta: Build, make_gram: Build) -> None:
    delta, gram = make_delta(1100, 40), make_gram(40, 1e4)  # more rows than one piece
    u, v = torch.randn(1100, 3), torch.randn(3, 40)
    difference = delta.double() - u.double() @ v.double()
    expected = float(torch.trace(difference @ gram @ difference.T))
    assert whitened_error(delta, u, v, gram=gram) == pytest.approx(expected, rel=1e-12)


def test_arguments_are_checked(make_delta: Build) -> None:
    delta = make_delta(10, 20)
    square = torch.eye(20).double()
    with pytest.raises(ValueError, match="not both"):
        factorize(delta, gram=square, output_gram=square[:10, :10])
    with pytest.raises(ValueError, match=r"output_gram must be \[10, 10\]"):
        factorize(delta, output_gram=square)
    with pytest.raises(ValueError, match="rank 11"):
        factorize(delta, rank=11)
    with pytest.raises(ValueError, match="rank 5"):
        truncate(delta, factorize(delta, rank=4), 5, torch.float32)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("factor", [1e-12, 1e30, 1e60])
def test_units_of_the_gram_do_not_matter(
    make_delta: Build, make_gram: Build, rows: int, columns: int, factor: float
) -> None:
    delta, gram = make_delta(rows, columns), make_gram(columns, 1e6)
    root = torch.linalg.cholesky(gram)
    found = factorize(delta, gram=gram * factor, rank=20)
    u, v = truncate(delta, found, 20, torch.float32)
    best = optimum(delta, root)
    assert error(delta, u, v, root) <= best[20] * (1 + 1e-5)
    assert found.energy == pytest.approx(float(best[0] ** 2) * factor, rel=1e-5)
    assert found.spectrum.sum() == pytest.approx(float(best[0] ** 2 - best[20] ** 2) * factor, rel=1e-5)


def test_not_finite_is_an_error(make_delta: Build) -> None:
    delta = make_delta(30, 20)
    for rank in (5, None):
        with pytest.raises(RuntimeError, match="finite"):
            factorize(delta * torch.nan, rank=rank)


def test_refit_survives_columns_that_are_nearly_parallel() -> None:
    generator = torch.Generator().manual_seed(0)
    basis, delta = torch.randn(60, 4, generator=generator), torch.randn(60, 40, generator=generator)
    basis[:, 3] = basis[:, 2] + 1e-6 * torch.randn(60, generator=generator)
    made = Factorization(torch.ones(4).double(), 1.0, basis, "left")
    u, v = truncate(delta, made, 4, torch.float64)
    assert torch.linalg.norm(v - _refit(delta, u)) <= 1e-9 * torch.linalg.norm(v)  # normal equations: 1e-3


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_outlier_channels_do_not_force_fp64(
    make_delta: Build, make_gram: Build, monkeypatch: pytest.MonkeyPatch, rows: int, columns: int
) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("went through fp64")

    monkeypatch.setattr(whitened, "congruence", refuse)
    gram = make_gram(columns, 1e9)
    found = factorize(make_delta(rows, columns), gram=gram, rank=30)
    assert len(found.spectrum) == 30
    with pytest.raises(AssertionError, match="fp64"):
        factorize(make_delta(rows, columns), gram=gram)


def root_mean_square(matrix: Tensor, dim: int) -> Tensor:
    return matrix.double().square().mean(dim).sqrt()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("size", [1e-9, 1.0])
def test_factors_are_of_one_size_whatever_the_norm(
    make_delta: Build, make_gram: Build, rows: int, columns: int, size: float
) -> None:
    """Sensitivities are small and far apart; what is stored must fit fp16 and an optimizer's steps all the same."""
    delta, gram = make_delta(rows, columns), make_gram(columns, 1e6)
    scale = size * 10 ** torch.linspace(-0.8, 0.8, rows)
    found = factorize(scale[:, None] * delta, gram=gram)
    best = optimum(scale[:, None] * delta, torch.linalg.cholesky(gram))
    for dtype, excess in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
        u, v = truncate(delta, found, 40, dtype, norm=ChannelNorm(scale))
        ratio = root_mean_square(u, 0) / root_mean_square(v, 1)
        assert bool(((ratio > 0.49) & (ratio < 2.04)).all())
        lost = error(scale[:, None] * delta, scale[:, None].double() * u.double(), v, torch.linalg.cholesky(gram))
        assert lost < best[40] * (1 + excess)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_balancing_changes_no_bit_of_the_product(make_delta: Build, dtype: torch.dtype) -> None:
    """Even in fp32, in which a model multiplies one factor after the other."""
    u, v = make_delta(60, 12).to(dtype), (1e-6 * make_delta(12, 40) * torch.logspace(-3, 3, 12)[:, None]).to(dtype)
    powers = balancing_powers(u, v)
    inputs = make_delta(30, 40, seed=1).to(dtype)
    again = inputs @ (v / powers[:, None]).T @ (u * powers).T
    assert again.equal(inputs @ v.T @ u.T)
    assert not powers.eq(1).any()


def test_directions_that_hold_nothing_stay_so(make_delta: Build) -> None:
    u, v = make_delta(20, 4), make_delta(4, 30)
    u[:, 0], v[0], u[:, 1], v[2] = 0, 0, 0, 0
    powers = balancing_powers(u, v)
    assert powers[0] == 1
    assert powers.isfinite().all()
    assert (powers > 0).all()
    assert 0.5 < torch.linalg.norm((v / powers[:, None])[1]) < 2
    assert 0.5 < torch.linalg.norm((u * powers)[:, 2]) < 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_quantized_factors_are_of_one_size(make_delta: Build, dtype: torch.dtype) -> None:
    delta, form = 1e-3 * make_delta(96, 160), QuantizedLowRank(24, 4, 32)
    basis = truncate(delta, factorize(delta), 24, torch.float32)[0]
    expected = form.encode(delta, torch.float32, Measured(basis=basis))
    lost = (form.decode(expected, (96, 160), torch.float32) - delta).norm()
    for size in (1e-7, 1.0, 1e7):  # whatever the basis is multiplied with
        made = form.encode(delta, dtype, Measured(basis=size * basis))
        ratio = root_mean_square(made["u.scales"], 1) / root_mean_square(made["v.scales"], 1)
        assert bool(((ratio > 0.4) & (ratio < 2.5)).all())
        assert (form.decode(made, (96, 160), dtype).float() - delta).norm() < 1.02 * lost


@pytest.mark.parametrize(("rows", "columns"), [(300, 96), (96, 300)])
@pytest.mark.parametrize("condition", [1e2, 1e6])
@pytest.mark.parametrize("form", ["plain", "gram", "output"])
def test_spectrum_is_that_of_the_factorization(
    make_delta: Build, make_gram: Build, rows: int, columns: int, condition: float, form: str
) -> None:
    delta, gram = make_delta(rows, columns), make_gram(columns, condition)
    wide = delta.double()
    given = {"plain": {}, "gram": {"gram": gram}, "output": {"output_gram": wide @ gram @ wide.T}}[form]
    whole, (values, energy) = factorize(delta, **given), spectrum(delta, **given)
    errors = whole.energy - whole.spectrum.cumsum(0)
    kept = slice(0, 60)  # of 96
    assert values.dtype == torch.float64
    assert energy == pytest.approx(whole.energy, rel=1e-3)
    torch.testing.assert_close((energy - values.cumsum(0))[kept], errors[kept], rtol=1e-2, atol=1e-6 * energy)


@pytest.mark.parametrize(("rows", "columns"), [(300, 96), (96, 300)])
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e8])
@pytest.mark.parametrize("rank", [19, 38])
def test_coarse_directions_lose_next_to_nothing(
    make_delta: Build, make_gram: Build, rows: int, columns: int, condition: float, rank: int
) -> None:
    delta, gram = make_delta(rows, columns), make_gram(columns, condition)
    exact, coarse = (
        factorize(delta, gram=gram, rank=None if wide else rank, coarse=not wide) for wide in (True, False)
    )
    errors = [
        whitened_error(delta, *truncate(delta, found, rank, torch.float32), gram=gram) for found in (exact, coarse)
    ]
    assert errors[1] <= errors[0] * (1 + 1e-3)
    root = torch.linalg.cholesky(gram)
    shared = factorize(delta, gram=gram, rank=rank, root=root, coarse=True)
    assert shared.basis.equal(coarse.basis)
