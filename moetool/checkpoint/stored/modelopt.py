"""ModelOpt: NVFP4, FP8 and MXFP8 as NVIDIA publishes them.

NVFP4 has the bits of `NVFP4QTensor.dequantize`: `number · (scale · common scale)`, both products in fp32. FP8 is
`number · scale` in fp32, as engines multiply, and rounded once; `FP8QTensor.dequantize` gives that in fp32, and rounds
the scales before it multiplies where it is asked for 16 bits.

Source: https://github.com/NVIDIA/Model-Optimizer.
"""

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.stored.formats import QuantizedFiles, StoredFormat, StoredTensors
from moetool.checkpoint.stored.fp8 import BlockScaled, small_floats
from moetool.checkpoint.stored.matrix import DecodedMatrix, Spans
from moetool.errors import InvalidInputError

_GROUP = 16  # numbers of NVFP4 that share a scale
_SCALES, _COMMON = "weight_scale", "weight_scale_2"
_BITS = {"NVFP4": 4.5, "W4A16_NVFP4": 4.5, "FP8": 8, "FP8_PB_WO": 8, "FP8_PER_CHANNEL_PER_TOKEN": 8, "MXFP8": 8.25}
_MIXED = "MIXED_PRECISION"
_OF_INPUTS = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
_OF_ACTIVATIONS = re.compile(r"\.(input_scale|output_scale|[kvq]_scale|[kvq]_proj\.output_scale|[kv]_bias)$")


@dataclass(frozen=True)
class Nvfp4Matrix(DecodedMatrix):
    """A matrix `[out, in]` of numbers of 4 bits (e2m1), two in a byte. `parts` are these, the scales of groups of 16 in
    FP8, and the scale of these."""

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        columns, count = self.shape[-1], stop - start
        groups = columns // _GROUP
        numbers = small_floats(spans(self.parts[0], start * columns // 2, (count, columns // 2)))
        scales = small_floats(spans(self.parts[1], start * groups, (count, groups)))
        scales.mul_(spans(self.parts[2], 0, (1,)).float())
        numbers.unflatten(1, (groups, _GROUP)).mul_(scales[:, :, None])
        return numbers


def _find(files: QuantizedFiles) -> StoredTensors:
    kinds = _kinds(files)
    if unknown := [kind for kind in kinds if kind not in _BITS]:
        raise InvalidInputError(
            f"{files.path} is in ModelOpt's '{unknown[0]}'; moetool decodes {', '.join(_BITS)}. Take the checkpoint in "
            "16 bits."
        )
    if scaled := [name for name in files.tensors if name.endswith(_OF_INPUTS)]:
        raise InvalidInputError(
            f"{files.path}: {scaled[0]} changes what a matrix gets, which moetool does not decode. Take the checkpoint "
            "in 16 bits."
        )
    matrices = []
    for name, info in files.tensors.items():
        if info.dtype.itemsize == 1 and name.endswith(".weight"):
            matrices.append(_matrix(files, info, name.removesuffix("weight")))
    unused = [name for name in files.tensors if _OF_ACTIVATIONS.search(name)]
    return StoredTensors(matrices, f"ModelOpt's {', '.join(kinds)}", unused)


def _kinds(files: QuantizedFiles) -> list[str]:
    """Names of the schemes of a checkpoint, as ModelOpt has them."""
    said = files.entry.get("quant_algo")
    if said != _MIXED:
        return [str(said)]
    layers = files.entry.get("quantized_layers")
    each = layers.values() if isinstance(layers, dict) else ()
    return sorted({str(layer.get("quant_algo")) for layer in each if isinstance(layer, dict)}) or [_MIXED]


def _matrix(files: QuantizedFiles, codes: TensorInfo, module: str) -> DecodedMatrix:
    """Describe the matrix that the tensors of a module stand for, from their headers."""
    if (scales := files.tensors.get(f"{module}{_SCALES}")) is None:
        raise files.refuse(f"{codes.name} is stored in {codes.dtype}, and there is no {module}{_SCALES}")
    unfit = files.refuse(
        f"{codes.name} is {list(codes.shape)} in {codes.dtype}, its scales {scales.name} {list(scales.shape)} in "
        f"{scales.dtype}: these do not make a matrix"
    )
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise unfit
    if codes.dtype == torch.uint8:
        common = files.tensors.get(f"{module}{_COMMON}")
        if common is None:
            raise files.refuse(f"{codes.name} is stored in NVFP4, and there is no {module}{_COMMON}")
        rows, columns = codes.shape[0], codes.shape[1] * 2
        if scales.shape != (rows, columns // _GROUP) or columns % _GROUP or scales.dtype != torch.float8_e4m3fn:
            raise unfit
        if math.prod(common.shape) != 1:
            raise files.refuse(f"{common.name} has shape {list(common.shape)}, expected one number")
        return Nvfp4Matrix(codes.name, (rows, columns), files.dtype, (codes.name, scales.name, common.name))
    rows, columns = codes.shape
    grid = tuple(size for size in scales.shape if size != 1) or (1,)
    grid = (*grid, 1) if len(grid) == 1 else grid
    if len(grid) != 2 or rows % grid[0] or columns % grid[1] or codes.dtype != torch.float8_e4m3fn:
        raise unfit
    block, parts = (rows // grid[0], columns // grid[1]), (codes.name, scales.name)
    return BlockScaled(codes.name, codes.shape, files.dtype, parts, (grid[0], grid[1]), block)


def _bits(files: QuantizedFiles, module: str) -> float:
    return max(_BITS.get(kind, 8) for kind in _kinds(files))


FORMAT = StoredFormat(("modelopt",), _find, _bits)
