"""bitsandbytes: NF4 or FP4 with a scale per block of the flattened matrix, quantized itself or not, and int8 per row.

What is decoded has the bits of `bitsandbytes.functional.dequantize_4bit` and `int8_vectorwise_dequant`. torch alone
computes it: the library's kernels for processors give other numbers where blocks do not divide rows (0.50).

Source: https://github.com/bitsandbytes-foundation/bitsandbytes, arXiv:2305.14314, arXiv:2208.07339.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.checkpoint.stored.codes import looked_up, table_of_halves
from moetool.checkpoint.stored.formats import QuantizedFiles, StoredFormat, StoredTensors
from moetool.checkpoint.stored.matrix import DecodedMatrix, Spans
from moetool.errors import InvalidInputError

_STATE = ".quant_state.bitsandbytes__"
_LEVELS, _SCALES, _OUTER, _OUTER_LEVELS = ".quant_map", ".absmax", ".nested_absmax", ".nested_quant_map"
_KINDS = ("nf4", "fp4")
_BY_127 = 7.874015718698502e-3  # as the library rounds 1 / 127
_FORM, _ROWS = "weight_format", "SCB"
_PARTS = 3  # tensors of a matrix whose scales are not codes
_ROW_BY_ROW = 0  # of `weight_format`


@dataclass(frozen=True)
class FourBits(DecodedMatrix):
    """A matrix of codes of 4 bits, the first of two in the high bits. `parts` are codes, levels and scales, and, where
    the scales are codes of 8 bits, their scales and levels.

    Attributes:
        held: dtype of the tensor of codes, whose bytes they are.
        block: numbers of the flattened matrix that share a scale.
        rounded: dtype in which the library has the matrix.
        outer: scales that share a scale; 0 if they are not codes.
        offset: what is added to scales that are codes.
    """

    held: torch.dtype
    block: int
    rounded: torch.dtype
    outer: int = 0
    offset: float = 0.0

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        columns, size = self.shape[-1], self.held.itemsize
        low, high = start * columns // self.block, -(-stop * columns // self.block)  # blocks
        begin, end = low * self.block, min(high * self.block, math.prod(self.shape))
        first, last = begin // 2 // size, -(-end // (2 * size))  # elements of the tensor of codes
        levels = table_of_halves(spans(self.parts[1], 0, (16,)))
        held = spans(self.parts[0], first, (last - first,)).view(torch.uint8)
        numbers, scales = looked_up(held[None], levels)[0, : end - begin], self._scales(spans, low, high)
        whole = (end - begin) // self.block
        numbers[: whole * self.block].view(-1, self.block).mul_(scales[:whole, None])
        numbers[whole * self.block :].mul_(scales[whole:])
        own = numbers[start * columns - begin : stop * columns - begin]
        return own.to(self.rounded).view(stop - start, columns)

    def _scales(self, spans: Spans, low: int, high: int) -> Tensor:
        """Those of the blocks `low` to `high`, in fp32."""
        held = spans(self.parts[2], low, (high - low,))
        if not self.outer:
            return held.float()
        first, last = low // self.outer, -(-high // self.outer)
        scales = spans(self.parts[3], first, (last - first,)).float()
        levels = spans(self.parts[4], 0, (256,)).float()
        each = torch.arange(low, high) // self.outer - first
        return levels[held.int()] * scales[each] + self.offset


@dataclass(frozen=True)
class EightBits(DecodedMatrix):
    """A matrix of whole numbers of 8 bits with the largest absolute value of each row. `parts` are these."""

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        columns = self.shape[1]
        numbers = spans(self.parts[0], start * columns, (stop - start, columns)).float()
        return numbers.mul_(spans(self.parts[1], start, (stop - start, 1))).mul_(_BY_127)


def _find(files: QuantizedFiles) -> StoredTensors:
    if files.entry.get("load_in_8bit"):
        return _in_eight_bits(files)
    matrices: list[DecodedMatrix] = []
    for name in files.tensors:
        shown, is_state, kind = name.partition(_STATE)
        if is_state:
            matrices.append(_in_four_bits(files, shown, kind, _state(files, name)))
    known = {matrix.parts[0] for matrix in matrices}
    for name, info in files.tensors.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) not in known:
            raise files.refuse(f"{name} is there, and there is no {name.removesuffix(_SCALES)}{_STATE}nf4, nor fp4")
        if name.endswith(".weight") and info.dtype == torch.uint8 and name not in known:
            raise files.refuse(f"{name} is stored in bytes, and there is no {name}{_STATE}nf4, nor fp4")
    kinds = sorted({"double quantization" for matrix in matrices if len(matrix.parts) > _PARTS})
    named = str(files.entry.get("bnb_4bit_quant_type", "")).upper() or "4 bits"
    states = [name for name in files.tensors if _STATE in name]
    return StoredTensors(matrices, f"bitsandbytes ({', '.join([named, *kinds])})", states)


def _state(files: QuantizedFiles, name: str) -> Mapping[str, object]:
    """What the library notes of a matrix: a JSON object as bytes. Raises `InvalidInputError`."""
    try:
        state = json.loads(bytes(files.read(name).tolist()))
    except (ValueError, TypeError) as error:
        raise files.refuse(f"{name} holds no JSON ({error})") from error
    shape = state.get("shape") if isinstance(state, dict) else None
    if not isinstance(shape, list) or len(shape) < 2 or not all(type(size) is int and size > 0 for size in shape):
        raise files.refuse(f"{name} has no shape of a matrix")
    return state


def _in_four_bits(files: QuantizedFiles, name: str, kind: str, state: Mapping[str, object]) -> FourBits:
    """Describe the matrix that codes, levels, scales and the library's notes stand for."""
    shape: tuple[int, ...] = tuple(state["shape"])  # type: ignore[arg-type]
    block, outer = state.get("blocksize"), state.get("nested_blocksize", 0)
    rounded, offset = getattr(torch, str(state.get("dtype")), None), state.get("nested_offset", 0.0)
    if kind not in _KINDS or type(block) is not int or block < 32 or block % 32 or type(outer) is not int or outer < 0:
        raise files.refuse(f"{name} is of the kind {kind!r} in blocks of {block!r}; expected nf4 or fp4 in 32s")
    if rounded not in (torch.float16, torch.bfloat16, torch.float32) or not isinstance(offset, float):
        raise files.refuse(f"{name}{_STATE}{kind} names the dtype {state.get('dtype')!r}")
    count = math.prod(shape)
    blocks = -(-count // block)
    endings: dict[str, int] = {_LEVELS: 16, _SCALES: blocks}
    if outer:
        endings |= {_OUTER: -(-blocks // outer), _OUTER_LEVELS: 256}
    for ending, size in endings.items():
        info = files.tensors.get(f"{name}{ending}")
        is_code = ending == _SCALES and outer > 0
        if info is None or math.prod(info.shape) != size or (info.dtype == torch.uint8) != is_code:
            told = "missing" if info is None else f"{list(info.shape)} in {info.dtype}"
            raise files.refuse(f"{name}{ending} is {told}, expected {size} for a matrix {list(shape)}")
    codes = files.tensors.get(name)
    if codes is None or codes.nbytes != -(-count // 2):
        told = "missing" if codes is None else f"of {codes.nbytes} bytes"
        raise files.refuse(f"{name} is {told}, expected {-(-count // 2)} bytes for a matrix {list(shape)} in 4 bits")
    parts = (name, *(f"{name}{ending}" for ending in endings))
    notes = (f"{name}{_STATE}{kind}",)
    return FourBits(name, shape, files.dtype, parts, codes.dtype, block, rounded, outer, offset, notes=notes)


def _in_eight_bits(files: QuantizedFiles) -> StoredTensors:
    matrices: list[DecodedMatrix] = []
    forms = [name for name in files.tensors if name.endswith(_FORM)]
    for name in forms:
        if (form := int(files.read(name).view(-1)[0])) != _ROW_BY_ROW:
            raise InvalidInputError(
                f"{name} of {files.path} is {form}: its rows lie as a card has them. Load the checkpoint with "
                "bitsandbytes and save it again."
            )
    for name, info in files.tensors.items():
        if info.dtype != torch.int8:
            continue
        scales = files.tensors.get(f"{name.removesuffix('weight')}{_ROWS}")
        if scales is None or len(info.shape) != 2 or math.prod(scales.shape) != info.shape[0]:
            told = "missing" if scales is None else list(scales.shape)
            raise files.refuse(f"{name} {list(info.shape)} is stored in int8, and the scales of its rows are {told}")
        notes = tuple(form for form in (name.removesuffix("weight") + _FORM,) if form in files.tensors)
        matrices.append(EightBits(name, info.shape, files.dtype, (name, scales.name), notes=notes))
    return StoredTensors(matrices, "bitsandbytes (int8)", forms)


def _bits(files: QuantizedFiles, module: str) -> float:
    if files.entry.get("load_in_8bit"):
        return 8
    return 4 + ((8 + 32 / 256) if files.entry.get("bnb_4bit_use_double_quant") else 32) / 64


FORMAT = StoredFormat(("bitsandbytes",), _find, _bits)
