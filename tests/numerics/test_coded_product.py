"""Products with packed codes are those with the matrix that they stand for."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.numerics import coded_product as module
from moetool.numerics.coded_product import LOOKED_UP_BITS, can_multiply, coded_product
from moetool.numerics.packing import pack
from moetool.numerics.quantization import dequantize

ROWS, COLUMNS, GROUPS = 48, 60, 4


def stored(bits: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, scales and the matrix."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, min(255, 1 << bits), (ROWS * COLUMNS,), dtype=torch.uint8, generator=generator)
    scales = torch.rand(ROWS, GROUPS, generator=generator).to(dtype)
    return pack(codes, bits), scales, dequantize(codes, scales, bits, torch.float64)


def error(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.norm(found.double() - expected) / torch.linalg.norm(expected))


@pytest.mark.parametrize("bits", LOOKED_UP_BITS)
@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)], ids=str
)
@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
def test_is_the_product(
    bits: int, dtype: torch.dtype, largest: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, scales, matrix = stored(bits, dtype)
    inputs = torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    for tile in (1, 5 * COLUMNS, 1 << 20):
        monkeypatch.setattr(module, "_TILE", tile)
        found = coded_product(codes, scales, bits, COLUMNS, inputs)
        assert found.shape == (tokens, ROWS)
        assert found.dtype == dtype
        if tokens:
            assert error(found, F.linear(inputs.double(), matrix)) < largest


@pytest.mark.parametrize("bits", LOOKED_UP_BITS)
def test_any_group_and_any_place_in_memory(bits: int) -> None:
    """Groups of one or all of a row, and bytes that begin anywhere."""
    codes, _, _ = stored(bits)
    moved = torch.cat([codes.new_zeros(3), codes])[3:]
    inputs = torch.eye(COLUMNS)
    for groups in (1, COLUMNS):
        scales = torch.arange(1.0, ROWS * groups + 1).view(ROWS, groups)
        units = coded_product(codes, torch.ones_like(scales), bits, COLUMNS, inputs)
        found = coded_product(moved, scales, bits, COLUMNS, inputs)
        assert found.equal(units * scales.repeat_interleave(COLUMNS // groups, 1).T)


def test_large_numbers_in_half_precision() -> None:
    """The sum of a group's codes times inputs is beyond 65504 where the result is not."""
    codes = pack(torch.full((ROWS * COLUMNS,), 254, dtype=torch.uint8), 8)
    scales = torch.full((ROWS, 1), 0.01, dtype=torch.float16)
    found = coded_product(codes, scales, 8, COLUMNS, torch.full((1, COLUMNS), 20.0, dtype=torch.float16))
    assert error(found, torch.full((1, ROWS), 127 * 20 * COLUMNS * 0.01).double()) < 1e-3


def test_scales_that_are_not_finite_go_through() -> None:
    codes, scales, _ = stored(4)
    scales[3, 1], scales[5, 0] = torch.nan, torch.inf
    found = coded_product(codes, scales, 4, COLUMNS, torch.ones(2, COLUMNS))
    assert found[:, 3].isnan().all()
    assert not found[:, 5].isfinite().any()
    assert found[:, [row for row in range(ROWS) if row not in (3, 5)]].isfinite().all()


def test_what_it_does_not_know() -> None:
    assert not can_multiply(4, 47, torch.float32)
    assert not can_multiply(3, 44, torch.float32)
    assert not can_multiply(8, 48, torch.float64)
    assert not can_multiply(8, 0, torch.float32)
    assert can_multiply(8, 47, torch.bfloat16)
