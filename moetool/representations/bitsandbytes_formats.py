"""The 4- and 8-bit formats of bitsandbytes for a matrix that is not a delta, number for number.

Made and read by plain torch on any device; on a card bitsandbytes' own kernels unpack them where it is installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.numerics.work import Work
from moetool.representations.base import KeepsWide, Representation, Stored, Weight
from moetool.representations.measured import NOTHING, Measured
from moetool.representations.operand import Operand, Products
from moetool.representations.work import nearest_codes

BLOCK = 64  # numbers that share an absmax in NF4
_CHUNK = 1 << 18  # bytes unpacked at a time
_BY_127 = 7.874015718698502e-3  # as bitsandbytes rounds 1 / 127

# Quantiles of a normal variable, scaled to end at 1, with an exact zero (QLoRA, arXiv:2305.14314, Appendix E).
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class NF4(Representation):
    """NormalFloat codes, two per byte, the first in the high bits, and an fp32 absmax per 64 numbers of the flattened
    matrix; what `bitsandbytes.functional.quantize_4bit(quant_type="nf4", blocksize=64)` gives."""

    kind: ClassVar[str] = "nf4"
    uses_base: ClassVar[bool] = False
    is_cheap: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ("nf4",)

    @property
    def doubtful_error(self) -> float:
        return 0.25

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        numbers = shape[0] * shape[1]
        return {
            "codes": Stored((-(-numbers // 2),), torch.uint8),
            "absmax": Stored((-(-numbers // BLOCK),), torch.float32),
        }

    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        flat = _finite(matrix).reshape(-1)
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        absmax = blocks.abs().amax(1)
        unit = blocks / torch.where(absmax > 0, absmax, 1.0)[:, None]
        levels = torch.tensor(NF4_LEVELS, device=flat.device)
        codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).view(-1)
        codes = F.pad(codes[: len(flat)], (0, len(flat) % 2), value=NF4_LEVELS.index(0.0))
        return {"codes": (codes[::2] << 4) | codes[1::2], "absmax": absmax}

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return NF4Weight(shape, self.tensors(shape), device)

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        return super().work(matrix) + nearest_codes(matrix[0] * matrix[1])

    def damage(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str | None:
        return _negative(tensors["absmax"])


@dataclass(frozen=True)
class Int8(Representation):
    """Row-wise absmax: codes [out, in] int8 and an fp32 absmax per row, as `int8_vectorwise_quant` of LLM.int8()."""

    kind: ClassVar[str] = "int8"
    uses_base: ClassVar[bool] = False
    is_cheap: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ("int8",)

    @property
    def doubtful_error(self) -> float:
        return 0.05

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        return {"codes": Stored(shape, torch.int8), "absmax": Stored((shape[0],), torch.float32)}

    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        wide = _finite(matrix)
        absmax = wide.abs().amax(1)
        scaled = wide * (127.0 / torch.where(absmax > 0, absmax, 1.0))[:, None]
        return {"codes": scaled.round().to(torch.int8), "absmax": absmax}

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return Int8Weight(shape, self.tensors(shape), device)

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        return super().work(matrix) + nearest_codes(matrix[0] * matrix[1])

    def damage(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str | None:
        beyond = int((tensors["codes"] == -128).sum())
        return f"{beyond} codes are -128, the least is -127" if beyond else _negative(tensors["absmax"])


def _negative(absmax: Tensor) -> str | None:
    below = int((absmax < 0).sum())
    return f"{below} absmax are negative" if below else None


def _finite(matrix: Tensor) -> Tensor:
    """The matrix in fp32. Raises `ValueError` for values that no code stands for."""
    wide = matrix.detach().float()
    if not bool(wide.isfinite().all()):
        raise ValueError("a matrix with values that are not finite cannot be quantized")
    return wide


class _FormatWeight(KeepsWide, Weight):
    """Run-time form: a product unpacks the matrix. Nothing in it can be trained."""

    kept_wide: ClassVar[tuple[str, ...]] = ("absmax",)  # a model in half precision keeps the scales that were stored
    codes: Tensor
    absmax: Tensor

    def __init__(self, shape: tuple[int, int], stored: dict[str, Stored], device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        for name, entry in stored.items():
            self.register_buffer(name, torch.zeros(entry.shape, dtype=entry.dtype, device=device))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.dense().to(inputs.dtype))


class NF4Weight(_FormatWeight):
    """A matrix in bitsandbytes' 4-bit NormalFloat codes at run time, decoded by bitsandbytes on a card and by torch
    elsewhere."""

    def dense(self) -> Tensor:
        numbers = self.shape[0] * self.shape[1]
        absmax = self.absmax.float()
        if self.codes.is_cuda:
            try:
                from bitsandbytes.functional import dequantize_4bit
            except ImportError:
                pass
            else:
                out = torch.empty(self.shape, dtype=torch.float32, device=self.codes.device)
                return dequantize_4bit(
                    self.codes.view(-1, 1), absmax=absmax, out=out, blocksize=BLOCK, quant_type="nf4"
                )
        # Both levels of a byte at once, piece by piece: the wider indices of all bytes would not fit any cache.
        byte = torch.arange(256, device=self.codes.device)
        pairs = torch.tensor(NF4_LEVELS, device=self.codes.device)[torch.stack([byte >> 4, byte & 15], dim=1)]
        values = torch.zeros(len(absmax) * BLOCK, device=self.codes.device)
        two = values.view(-1, 2)
        for start in range(0, len(self.codes), _CHUNK):
            part = slice(start, min(start + _CHUNK, len(self.codes)))
            two[part] = pairs.index_select(0, self.codes[part].int())
        values.view(-1, BLOCK).mul_(absmax[:, None])
        return values[:numbers].view(self.shape)

    def products(self) -> Products:
        levels = _levels(self.codes.device)
        return ((Operand("nf4", self.shape, self.codes, self.absmax, bits=4, group=BLOCK, levels=levels),),)


@cache
def _levels(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(NF4_LEVELS, device=device)


class Int8Weight(_FormatWeight):
    """A matrix of int8 numbers with one fp32 absolute maximum per row at run time (bitsandbytes' LLM.int8 format)."""

    def dense(self) -> Tensor:
        return self.codes.float() * self.absmax.float()[:, None] * _BY_127

    def products(self) -> Products:
        return ((Operand("int8", self.shape, self.codes, self.absmax, bits=8, group=self.shape[1]),),)
