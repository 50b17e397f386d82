"""FP8: numbers of 8 bits with a scale per block, per row or per tensor; experts of DeepSeek-V4 also FP4, two in a byte.

What is decoded is `number · scale` in fp32, rounded to the dtype of the model, as transformers' `Fp8Dequantize` has it
(`transformers.integrations.finegrained_fp8`). Two things differ. Blocks are those of `weight_block_size`, of which the
last may be cut off, as in the kernels of DeepSeek-V3 (`inference/kernel.py`, `weight_dequant`): transformers divides a
matrix evenly by its scales and refuses the 576 rows of `kv_a_proj_with_mqa`. And a model that is loaded in fp32 has the
numbers of its own dtype, which is what everything that is made of it has, too.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.stored.codes import looked_up, table_of_halves
from moetool.checkpoint.stored.formats import QuantizedFiles, StoredFormat, StoredTensors
from moetool.checkpoint.stored.matrix import DecodedMatrix, Spans
from moetool.errors import InvalidInputError

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
# What follows the name of a matrix without `weight`: DeepSeek-V3's name, those that transformers renames to it, and
# that of AutoFP8 and vLLM.
_SCALES = ("weight_scale_inv", "scale", "qscale_weight", "weight_scale")
_OF_ACTIVATIONS = re.compile(r"(^|[._])(activation_scale|input_scale|qscale_act|k_scale|v_scale|q_scale|prob_scale)$")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@cache
def _pairs() -> Tensor:
    """The table `[256, 2]` of bytes that hold two numbers of 4 bits, the lower half first."""
    return table_of_halves(torch.tensor(_E2M1)).flip(1)


def small_floats(codes: Tensor) -> Tensor:
    """Numbers of 8 bits `[rows, columns]`, or of 4 (e2m1) as two per byte `[rows, columns / 2]`, in fp32.

    Bits of e4m3 and e5m2 are put where fp16 has its own: a fortieth of the time of torch's conversion on a CPU.
    """
    if not codes.dtype.is_floating_point:
        return looked_up(codes.view(torch.uint8), _pairs())
    bits = codes.view(torch.int8).to(torch.int16)
    if codes.dtype == torch.float8_e5m2:  # the upper half of fp16
        return bits.bitwise_left_shift_(8).view(torch.float16).float()
    # The sign is in bits 8 to 15. Exponents of e4m3 have 1 bit less, and stand for 2⁸ times as much.
    numbers = bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16).float().mul_(256)
    magnitudes = codes.view(torch.uint8) & 127
    return numbers.masked_fill_(magnitudes == 127, torch.nan) if int(magnitudes.max()) == 127 else numbers


def scales_in_fp32(scales: Tensor) -> Tensor:
    """Scales as they multiply; bytes are exponents of two, less 127."""
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


@dataclass(frozen=True)
class BlockScaled(DecodedMatrix):
    """A matrix of small floating point numbers, each block of which has a scale. `parts` are numbers and scales.

    Attributes:
        grid: of a matrix's scales, rows and columns.
        block: rows and columns that share one; the last ones of a matrix may be cut off.
        is_packed: whether two numbers are in a byte.
    """

    grid: tuple[int, int]
    block: tuple[int, int]
    is_packed: bool = False

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        codes, scales = self.parts
        columns = self.shape[-1]
        held = columns // 2 if self.is_packed else columns
        numbers = small_floats(spans(codes, start * held, (stop - start, held)))
        rows = torch.arange(start, stop)
        matrix, row = rows // self.shape[-2], rows % self.shape[-2]
        lines = matrix * self.grid[0] + row // self.block[0]
        first, last = int(lines[0]), int(lines[-1]) + 1
        held_scales = spans(scales, first * self.grid[1], (last - first, self.grid[1]))
        own = scales_in_fp32(held_scales)[lines - first]  # [rows, blocks]
        width = self.block[1]
        whole = columns // width * width
        numbers[:, :whole].unflatten(1, (-1, width)).mul_(own[:, : whole // width, None])
        if whole < columns:
            numbers[:, whole:].mul_(own[:, -1:])
        return numbers


def _find(files: QuantizedFiles) -> StoredTensors:
    tensors, block = files.tensors, _block_size(files.entry)
    scaled = _with_scales(tensors)
    matrices = [_matrix(files, tensors[name], tensors[own], block) for name, own in scaled.items()]
    if alone := [name for name, info in tensors.items() if info.dtype in _FP8 and name not in scaled]:
        missing = _scales_name(alone[0], _SCALES[0])
        raise files.refuse(f"{alone[0]} is stored in FP8, and there is no {missing} ({len(alone)} have no scales)")
    unused = [name for name in tensors if _OF_ACTIVATIONS.search(name) and name not in scaled.values()]
    description = "FP8" if block is None else f"FP8 in blocks of {block[0]} × {block[1]}"
    return StoredTensors(matrices, description, unused)


def _block_size(entry: Mapping[str, object]) -> tuple[int, int] | None:
    block = entry.get("weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise InvalidInputError(f"quantization_config.weight_block_size must be two numbers above 0, not {block!r}.")
    return block[0], block[1]


def _with_scales(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The name of the scales of each matrix that has some. A `scale` beside a matrix of 16 bits is something else."""
    found: dict[str, str] = {}
    for name, info in tensors.items():
        for ending in _SCALES:
            scales, is_small = _scales_name(name, ending), info.dtype.itemsize == 1
            if len(info.shape) >= 2 and scales in tensors and (is_small or ending != "scale"):
                found.setdefault(name, scales)
    return found


def _scales_name(name: str, ending: str) -> str:
    """`a.b.weight_scale_inv` for a matrix `a.b.weight`, `a.b_scale_inv` for one that is a parameter `a.b` by itself."""
    if name.endswith(".weight"):
        return name.removesuffix("weight") + ending
    return name + "_" + ending.removeprefix("weight_")


def _matrix(files: QuantizedFiles, codes: TensorInfo, scales: TensorInfo, block: tuple[int, int] | None) -> BlockScaled:
    """Describe the matrix that FP8 numbers and their scales stand for, from both headers."""
    is_packed = codes.dtype == torch.int8 or (codes.dtype == torch.uint8 and scales.dtype in _EXPONENTS)
    if codes.dtype not in _FP8 and not is_packed:
        raise files.refuse(f"{codes.name} is stored in {codes.dtype}, and has scales, {scales.name}: it is FP8 or not")
    if not (scales.dtype.is_floating_point or scales.dtype == torch.uint8):
        raise files.refuse(f"{scales.name} is stored in {scales.dtype}, which no scales are")
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if is_packed else 1))
    rows, columns = shape[-2:]
    is_single = math.prod(scales.shape) == math.prod(shape[:-2])
    by_row = scales.shape == shape[:-1]
    grid = (1, 1) if is_single else (*scales.shape, 1) if by_row else scales.shape[-2:]
    by = "" if block is None else f" in blocks of {block[0]} × {block[1]}"
    unfit = files.refuse(
        f"{codes.name} has shape {list(codes.shape)}, its scales {scales.name} {list(scales.shape)}: these are not the "
        f"scales of such a matrix{by}"
    )
    if not math.prod(shape) or (not is_single and scales.shape[:-2] != shape[:-2]) or len(grid) != 2 or 0 in grid:
        raise unfit
    own = rows // grid[0], columns // grid[1]
    if block is not None and grid == (-(-rows // block[0]), -(-columns // block[1])):
        own = block
    elif rows % grid[0] or columns % grid[1]:
        raise unfit
    return BlockScaled(codes.name, shape, files.dtype, (codes.name, scales.name), grid, own, is_packed)


def _bits(files: QuantizedFiles, module: str) -> float:
    return 8 + (0 if (block := _block_size(files.entry)) is None else 32 / math.prod(block))


FORMAT = StoredFormat(("fp8", "mxfp8", "fbgemm_fp8"), _find, _bits)
