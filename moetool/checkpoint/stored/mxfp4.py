"""MXFP4: experts of gpt-oss, 32 numbers of 4 bits (e2m1) with an exponent of two, as transformers dequantizes them.

Source: `convert_moe_packed_tensors` of `transformers.integrations.mxfp4`. The files have `[experts, out, groups, 16]`;
what transformers makes of that, and an ordinary checkpoint of the family has, is `[experts, in, out]`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.checkpoint.stored.formats import QuantizedFiles, StoredFormat, StoredTensors
from moetool.checkpoint.stored.fp8 import scales_in_fp32, small_floats
from moetool.checkpoint.stored.matrix import DecodedMatrix, Spans

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32  # numbers that share an exponent
_AT_ONCE = 1 << 18  # numbers that are decoded together


@dataclass(frozen=True)
class TurnedExperts(DecodedMatrix):
    """Matrices `[experts, in, out]`, in the files turned. `parts` are the numbers and their exponents."""

    def rows(self, spans: Spans, start: int, stop: int) -> Tensor:
        inside, outside = self.shape[1:]
        rows = torch.empty(stop - start, outside, dtype=self.dtype)
        for expert in range(start // inside, -(-stop // inside)):
            first, last = max(start, expert * inside), min(stop, (expert + 1) * inside)
            step = max(1, _AT_ONCE // inside)
            for line in range(0, outside, step):
                end = min(line + step, outside)
                found = self.decode(spans, expert * outside + line, expert * outside + end)
                kept = found[:, first - expert * inside : last - expert * inside]
                rows[first - start : last - start, line:end] = kept.T
        return rows

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        """Decode lines `start` to `stop` of the files to `[stop - start, in]` fp32."""
        blocks, scales = self.parts
        count, groups = stop - start, self.shape[1] // _GROUP
        numbers = small_floats(spans(blocks, start * groups * _GROUP // 2, (count, groups * _GROUP // 2)))
        exponents = scales_in_fp32(spans(scales, start * groups, (count, groups)))
        return numbers.unflatten(1, (groups, _GROUP)).mul_(exponents[:, :, None]).flatten(1)


def _find(files: QuantizedFiles) -> StoredTensors:
    matrices = []
    for name, blocks in files.tensors.items():
        if not name.endswith(_BLOCKS):
            continue
        shown = name.removesuffix(_BLOCKS)
        if (scales := files.tensors.get(f"{shown}{_SCALES}")) is None:
            raise files.refuse(f"{name} is stored in MXFP4, and there is no {shown}{_SCALES}")
        if len(blocks.shape) != 4 or blocks.shape[3] * 2 != _GROUP or scales.shape != blocks.shape[:3]:
            raise files.refuse(
                f"{name} has shape {list(blocks.shape)}, its scales {scales.name} {list(scales.shape)}: expected "
                f"[experts, out, groups, {_GROUP // 2}] and [experts, out, groups]"
            )
        if {blocks.dtype, scales.dtype} != {torch.uint8} or not math.prod(blocks.shape):
            raise files.refuse(f"{name} and {scales.name} are {blocks.dtype} and {scales.dtype}, not bytes")
        experts, out, groups, _ = blocks.shape
        shape = experts, groups * _GROUP, out
        matrices.append(TurnedExperts(shown, shape, files.dtype, (name, scales.name)))
    return StoredTensors(matrices, "MXFP4")


def _bits(files: QuantizedFiles, module: str) -> float:
    return 4 + 8 / _GROUP if ".experts." in module else 8 * files.dtype.itemsize


FORMAT = StoredFormat(("mxfp4",), _find, _bits)
