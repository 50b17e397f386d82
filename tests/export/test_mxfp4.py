"""Rows in MXFP4, beside the library's own coder and decoder."""

import pytest
import torch

from moetool.export.gguf.mxfp4 import mxfp4_bytes

gguf = pytest.importorskip("gguf")


def decoded(coded: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(coded.numpy(), gguf.GGMLQuantizationType.MXFP4))


def test_codes_are_the_nearest() -> None:
    rows = torch.randn(12, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 12, 2)[:, None]
    rows[3] = 0
    expected = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType.MXFP4)
    found = mxfp4_bytes(rows)
    assert found.shape == expected.shape
    torch.testing.assert_close(decoded(found), decoded(torch.from_numpy(expected)), rtol=0, atol=0)


def test_what_is_in_it_already_is_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(8, (64, 32), generator=generator)
    codes[:8] = codes[:8].clamp(max=2)  # blocks that use small codes alone, under a power that is not the least
    powers = torch.randint(-20, 20, (64, 1), generator=generator)
    signs = torch.randint(2, (64, 32), generator=generator) * 2 - 1
    rows = torch.ldexp(levels[codes] * signs, powers)
    assert torch.equal(decoded(mxfp4_bytes(rows)), rows)
