"""Levels, scales and codes: optimal where that is known, better than rounding to the nearest where it is not."""

import pytest
import torch
from torch import Tensor

from moetool.numerics.quantization import BITS, dequantize, is_whole, levels, nearest, quantize

CPU = torch.device("cpu")


def normal(rows: int = 64, columns: int = 256, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(matrix: Tensor, bits: int, group: int, dtype: torch.dtype = torch.bfloat16, **options: Tensor) -> float:
    codes, scales = quantize(matrix, bits, group, dtype, **options)
    wide = matrix.double()
    return float(torch.linalg.norm(dequantize(codes, scales, bits, torch.float64) - wide) / torch.linalg.norm(wide))


def absmax(matrix: Tensor, bits: int, group: int) -> float:
    """Relative error of rounding to the nearest of 2^bits - 1 even levels up to the group's largest value."""
    values = matrix.view(-1, group)
    top = 2 ** (bits - 1) - 1
    scale = values.abs().amax(1, keepdim=True) / top
    return float(torch.linalg.norm((values / scale).round() * scale - values) / torch.linalg.norm(values))


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_ascending_symmetric_and_exact_in_bf16(bits: int) -> None:
    grid = levels(bits, torch.float32, CPU)
    assert len(grid) == 2**bits
    assert grid.bfloat16().float().equal(grid)
    used = grid[:-1] if is_whole(bits) else grid
    assert (used.diff() > 0).all()
    assert used.flip(0).equal(-used)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_those_of_a_normal_variable(bits: int) -> None:
    """Each level is the mean of what is rounded to it (Lloyd's condition), up to its rounding to bf16."""
    draws = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grid = levels(bits, torch.float64, CPU)
    codes = torch.bucketize(draws, (grid[1:] + grid[:-1]) / 2)
    means = torch.zeros_like(grid).index_add(0, codes, draws) / torch.bincount(codes, minlength=len(grid))
    torch.testing.assert_close(means, grid, rtol=0.01, atol=0.005)


def test_one_bit_is_the_sign_times_the_mean_magnitude() -> None:
    matrix = normal()
    codes, scales = quantize(matrix, 1, 64, torch.float32)
    assert codes.equal((matrix >= 0).to(torch.uint8))
    torch.testing.assert_close(scales, matrix.view(64, 4, 64).abs().mean(2))


def test_one_bit_with_importance_is_the_weighted_mean() -> None:
    matrix, importance = normal(), torch.rand(256, generator=torch.Generator().manual_seed(2)) + 0.1
    _, scales = quantize(matrix, 1, 64, torch.float32, importance=importance)
    weighted = (matrix.abs() * importance).view(64, 4, 64).sum(2) / importance.view(4, 64).sum(1)
    torch.testing.assert_close(scales, weighted, rtol=1e-5, atol=0)


def test_one_bit_scale_is_optimal() -> None:
    matrix = normal().double()
    codes, scales = quantize(matrix, 1, 64, torch.float64)
    best = dequantize(codes, scales, 1, torch.float64).sub(matrix).square().sum()
    for factor in (0.999, 1.001):
        assert dequantize(codes, scales * factor, 1, torch.float64).sub(matrix).square().sum() > best


@pytest.mark.parametrize("bits", BITS[1:])
@pytest.mark.parametrize("seed", [0, 1])
def test_better_than_rounding_to_the_nearest(bits: int, seed: int) -> None:
    for matrix in (normal(seed=seed), torch.distributions.Laplace(0.0, 1.0).icdf(normal(seed=seed).sigmoid())):
        assert error(matrix, bits, 128) < absmax(matrix, bits, 128)
    assert error(normal(seed=seed), bits, 128) < {8: 0.0066, 6: 0.027, 5: 0.054, 4: 0.09, 3: 0.18, 2: 0.342}[bits]


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_nearest_for_the_stored_scale(bits: int) -> None:
    matrix = normal(8, 64)
    codes, scales = quantize(matrix, bits, 32, torch.bfloat16)
    decoded = dequantize(codes, scales, bits, torch.float32)
    grid = levels(bits, torch.float32, CPU)
    options = scales.float().repeat_interleave(32, 1).unsqueeze(2) * grid
    closest = (options - matrix.unsqueeze(2)).abs().amin(2)
    torch.testing.assert_close((decoded - matrix).abs(), closest, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_no_scale_nearby_is_better(bits: int) -> None:
    """The search ends where changing scale and codes together by up to 10 % gains nothing to speak of."""
    matrix = normal(16, 128)
    codes, scales = quantize(matrix, bits, 128, torch.float32)
    best = dequantize(codes, scales, bits, torch.float32).sub(matrix).square().sum(1)
    for factor in torch.linspace(0.9, 1.1, 21):
        other = scales * factor
        codes = nearest(matrix.view(16, 1, 128), other.unsqueeze(2), bits).view(16, 128)
        assert (dequantize(codes, other, bits, torch.float32).sub(matrix).square().sum(1) > 0.95 * best).all()


@pytest.mark.parametrize("bits", BITS)
def test_importance_lowers_the_weighted_error(bits: int) -> None:
    matrix = normal()
    importance = torch.logspace(-2, 2, 256)[torch.randperm(256, generator=torch.Generator().manual_seed(3))]

    def weighted(**options: Tensor) -> float:
        codes, scales = quantize(matrix, bits, 128, torch.float32, **options)
        return float((dequantize(codes, scales, bits, torch.float32).sub(matrix).square() * importance).sum())

    assert weighted(importance=importance) < 0.99 * weighted()
    assert weighted(importance=torch.ones(256)) == weighted()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e30])
def test_size_does_not_matter(bits: int, size: float) -> None:
    matrix = normal(4, 64)
    assert error(matrix * size, bits, 32, torch.float32) == pytest.approx(error(matrix, bits, 32, torch.float32), 3e-3)


@pytest.mark.parametrize("bits", BITS)
def test_nothing_is_nothing(bits: int) -> None:
    codes, scales = quantize(torch.zeros(2, 8), bits, 4, torch.bfloat16)
    assert dequantize(codes, scales, bits, torch.float32).equal(torch.zeros(2, 8))


@pytest.mark.parametrize("bits", [*filter(is_whole, BITS)])
def test_whole_numbers_keep_zeros(bits: int) -> None:
    matrix = normal(4, 64) * (torch.arange(64) % 3 > 0)
    codes, scales = quantize(matrix, bits, 32, torch.bfloat16)
    assert (dequantize(codes, scales, bits, torch.float32)[matrix == 0] == 0).all()


@pytest.mark.parametrize("bits", BITS)
def test_bf16_product_is_the_rounded_one(bits: int) -> None:
    codes, scales = quantize(normal(8, 64), bits, 16, torch.bfloat16)
    exact = dequantize(codes, scales, bits, torch.float32)
    assert dequantize(codes, scales, bits, torch.bfloat16).equal(exact.bfloat16())


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = normal()
    codes, scales = quantize(matrix, 4, 64, torch.bfloat16)
    decoded = dequantize(codes, scales, 4, torch.float32)
    for module in ("groups", "quantization"):
        monkeypatch.setattr(f"moetool.numerics.{module}.ELEMENTS", 700)
    again = quantize(matrix, 4, 64, torch.bfloat16)
    assert dequantize(codes, scales, 4, torch.float32).equal(decoded)
    assert codes.equal(again[0])
    assert scales.equal(again[1])


def test_nonsense() -> None:
    with pytest.raises(ValueError, match="bits, not 7"):
        quantize(normal(), 7, 64, torch.float32)
    for group in (0, 3, 512):
        with pytest.raises(ValueError, match="do not divide 256"):
            quantize(normal(), 4, group, torch.float32)
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.full((2, 4), float("nan")), 4, 4, torch.float32)
    for importance in (torch.ones(3), -torch.ones(256), torch.full((256,), float("inf"))):
        with pytest.raises(ValueError, match="importance must be"):
            quantize(normal(), 4, 64, torch.float32, importance=importance)


def test_unused_inputs_still_get_codes() -> None:
    importance = torch.cat([torch.ones(128), torch.zeros(128)])
    codes, scales = quantize(normal(), 4, 128, torch.float32, importance=importance)
    part = dequantize(codes, scales, 4, torch.float32)[:, 128:]
    assert torch.linalg.norm(part - normal()[:, 128:]) < 0.1 * torch.linalg.norm(normal()[:, 128:])
    quantize(normal(), 4, 128, torch.float32, importance=torch.zeros(256))
