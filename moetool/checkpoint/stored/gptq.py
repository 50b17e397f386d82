"""GPTQ: whole numbers of 2, 3, 4 or 8 bits in words along the inputs, with scales and zero points per group of these.

What is decoded has the bits of GPTQModel's `TorchLinear.dequantize_weight`, which transformers leaves the format to.
In the first version of the format, zero points are stored less one.

Source: https://github.com/ModelCloud/GPTQModel, arXiv:2210.17323.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.checkpoint.stored.codes import integers
from moetool.checkpoint.stored.formats import QuantizedFiles, StoredFormat, StoredTensors
from moetool.checkpoint.stored.matrix import Spans
from moetool.checkpoint.stored.turned import PARTS, TurnedIntegers, group_size, modules_of, scale_bits
from moetool.errors import InvalidInputError

_BITS = (4, 8, 3, 2)
_ORDER = "g_idx"
_LESS_ONE, _AS_THEY_ARE = "gptq", "gptq_v2"


@dataclass(frozen=True)
class GptqMatrix(TurnedIntegers):
    """A matrix `[out, in]` of a GPTQ checkpoint.

    Attributes:
        bits: of a number.
        is_less_one: whether zero points are stored less one.
    """

    bits: int
    is_less_one: bool

    @property
    def tile(self) -> tuple[int, int]:
        return (32 if self.bits == 3 else 32 // self.bits), 1

    def words(self, spans: Spans, first: int, last: int) -> Tensor:
        outputs, line = self.shape[0], first * self.bits // 32
        end = -(-last // self.tile[0]) * self.tile[0] * self.bits // 32
        return spans(self.parts[0], line * outputs, (end - line, outputs))

    def numbers(self, words: Tensor) -> Tensor:
        return integers(words.T.contiguous(), self.bits)

    def zeros(self, spans: Spans) -> Tensor:
        outputs = self.shape[0]
        words = spans(self.parts[1], 0, (self.groups, _words(outputs, self.bits)))
        if self.is_less_one and self.bits != 3:  # carries undo the borrows of one subtracted from whole words
            words += sum(1 << place for place in range(0, 32, self.bits))
        zeros = integers(words, self.bits)
        if self.is_less_one and self.bits == 3:
            zeros = (zeros + 1) % 8
        return zeros[:, :outputs]


def _words(numbers: int, bits: int) -> int:
    """How many words hold so many numbers."""
    return -(-numbers // 32) * 3 if bits == 3 else -(-numbers * bits // 32)


def _find(files: QuantizedFiles) -> StoredTensors:
    entry = files.entry
    form = entry.get("checkpoint_format") or entry.get("format") or _LESS_ONE
    if form not in (_LESS_ONE, _AS_THEY_ARE) or entry.get("is_marlin_format"):
        form = "marlin" if entry.get("is_marlin_format") else form
        raise InvalidInputError(
            f"{files.path} is in the layout '{form}' of GPTQ; moetool decodes '{_LESS_ONE}' and '{_AS_THEY_ARE}'. Take "
            "a checkpoint in one of these, or have GPTQModel dequantize it first."
        )
    modules = modules_of(files)
    matrices = [_matrix(files, module, form == _LESS_ONE) for module in modules]
    kinds = sorted({(own.bits, own.group) for own in matrices})
    told = ", ".join(f"{bits} bits in groups of {group}" for bits, group in kinds[:3]) + ", …" * (len(kinds) > 3)
    return StoredTensors(matrices, f"GPTQ ({told})", list(_idle_biases(files, modules)))


def _matrix(files: QuantizedFiles, module: str, is_less_one: bool) -> GptqMatrix:
    """Describe the matrix that the tensors of a module stand for, from their headers."""
    words, zeros, scales = (files.tensors[f"{module}{part}"] for part in PARTS)
    order = files.tensors.get(f"{module}{_ORDER}")
    groups, outputs = scales.shape
    said = files.entry.get("bits")
    for bits in sorted(_BITS, key=lambda own: own != said):  # of some modules they may be others (`dynamic`)
        inputs = order.shape[0] if order is not None and len(order.shape) == 1 else words.shape[0] * 32 // bits
        wanted = (_words(inputs, bits), outputs), (groups, _words(outputs, bits))
        if (words.shape, zeros.shape) == wanted:
            break
    else:
        raise files.refuse(
            f"{words.name} has shape {list(words.shape)}, its zero points {list(zeros.shape)}, its scales "
            f"{list(scales.shape)}: these are not of one matrix in {said!r} bits, nor in 2, 3, 4 or 8"
        )
    parts = tuple(info.name for info in (words, zeros, scales, order) if info is not None)
    if order is not None and (order.dtype != torch.int32 or order.shape != (inputs,)):
        raise files.refuse(f"{order.name} is {list(order.shape)} in {order.dtype}, expected the group of each input")
    group = group_size(files, module, inputs, groups)
    name, shape = f"{module}weight", (outputs, inputs)
    return GptqMatrix(name, shape, files.dtype, parts, group, groups, scales.dtype, bits, is_less_one)


def _idle_biases(files: QuantizedFiles, modules: Iterable[str]) -> Iterable[str]:
    """Biases of nothing but zeros, if every module has one: AutoGPTQ gave one to modules that have none, too."""
    names = [f"{module}bias" for module in modules]
    if not all(name in files.tensors for name in names):
        return []
    return [name for name in names if not bool(files.read(name).any())]


def _bits(files: QuantizedFiles, module: str) -> float:
    bits = files.entry.get("bits")
    return scale_bits(files.entry.get("group_size"), bits if type(bits) is int and bits in _BITS else 4)


FORMAT = StoredFormat(("gptq",), _find, _bits)
