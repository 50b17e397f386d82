"""AWQ: whole numbers of 4 bits, eight outputs in a word, with scales and zero points per group of inputs.

What is decoded has the bits of AutoAWQ's and GPTQModel's `dequantize_gemm`.

Source: https://github.com/casper-hansen/AutoAWQ, arXiv:2306.00978.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.checkpoint.stored.formats import QuantizedFiles, StoredFormat, StoredTensors
from moetool.checkpoint.stored.matrix import Spans
from moetool.checkpoint.stored.turned import PARTS, TurnedIntegers, group_size, modules_of, scale_bits
from moetool.errors import InvalidInputError

_BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of eight outputs one after the other
_GEMM = "gemm"


@dataclass(frozen=True)
class AwqMatrix(TurnedIntegers):
    """A matrix `[out, in]` of an AWQ checkpoint, in 4-bit words with scales and zero points."""

    @property
    def tile(self) -> tuple[int, int]:
        return 1, len(_PLACES)

    def words(self, spans: Spans, first: int, last: int) -> Tensor:
        columns = self.shape[0] // len(_PLACES)
        return spans(self.parts[0], first * columns, (last - first, columns))

    def numbers(self, words: Tensor) -> Tensor:
        turned = words.T.contiguous()
        numbers = torch.empty(len(turned), len(_PLACES), turned.shape[1])
        for output, place in enumerate(_PLACES):
            numbers[:, output] = turned >> _BITS * place & 15
        return numbers.flatten(0, 1)

    def zeros(self, spans: Spans) -> Tensor:
        return self.numbers(spans(self.parts[1], 0, (self.groups, self.shape[0] // len(_PLACES)))).T


def _find(files: QuantizedFiles) -> StoredTensors:
    entry = files.entry
    form = str(entry.get("version") or entry.get("format") or _GEMM).lower()
    if form != _GEMM or entry.get("bits", entry.get("w_bit", _BITS)) != _BITS:
        bits = entry.get("bits", entry.get("w_bit"))
        raise InvalidInputError(
            f"{files.path} is in the layout '{form}' of AWQ with {bits!r} bits; moetool decodes '{_GEMM}' with "
            f"{_BITS}. Take a checkpoint in that, or have the tool that wrote it dequantize it first."
        )
    if scaled := [name for name in files.tensors if name.endswith(".act.scales")]:
        raise InvalidInputError(
            f"{files.path} scales activations by {scaled[0]}, which the model's own classes have no place for. Take "
            "the checkpoint in 16 bits."
        )
    matrices = [_matrix(files, module) for module in modules_of(files)]
    groups = sorted({own.group for own in matrices})
    return StoredTensors(matrices, f"AWQ ({_BITS} bits in groups of {', '.join(map(str, groups))})")


def _matrix(files: QuantizedFiles, module: str) -> AwqMatrix:
    """Describe the matrix that the tensors of a module stand for, from their headers."""
    words, zeros, scales = (files.tensors[f"{module}{part}"] for part in PARTS)
    (inputs, columns), (groups, outputs) = words.shape, scales.shape
    if columns * len(_PLACES) != outputs or zeros.shape != (groups, columns):
        raise files.refuse(
            f"{words.name} has shape {list(words.shape)}, its zero points {list(zeros.shape)}, its scales "
            f"{list(scales.shape)}: these are not of one matrix in {_BITS} bits"
        )
    group, parts = group_size(files, module, inputs, groups), (words.name, zeros.name, scales.name)
    return AwqMatrix(f"{module}weight", (outputs, inputs), files.dtype, parts, group, groups, scales.dtype)


def _bits(files: QuantizedFiles, module: str) -> float:
    return scale_bits(files.entry.get("q_group_size", files.entry.get("group_size")), _BITS)


FORMAT = StoredFormat(("awq",), _find, _bits)
