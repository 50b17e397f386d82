"""The types that llama-quantize can give to each tensor of a file, and the estimated loss of each.

Where llama-quantize will code the tensors, losses are measured on an even grid with as many bits, and as many numbers
per scale. llama.cpp's own search for scales loses less, for all types about alike. `own_types` measures the losses of
codes that moetool chooses. Types for rows that are no whole super-blocks are those of llama-quant.cpp.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.export.choosing.menu import Menu
from moetool.export.gguf.file import GgufTensor
from moetool.format.gguf.blocks import BLOCK_TYPES, BlockType
from moetool.format.gguf.words import EMBEDDINGS, HEAD

_AT_ONCE = 1 << 22  # numbers that are rounded at a time


@dataclass(frozen=True)
class FewBits:
    """A type that llama-quantize gives to a tensor.

    Attributes:
        name: llama-quantize's.
    """

    name: str

    @property
    def layout(self) -> BlockType:
        """The layout of this type's blocks: numbers, bytes, groups and levels."""
        return BLOCK_TYPES[self.name.lower()]

    @property
    def bits(self) -> int:
        """Number of bits of one number's code, without its share of scales."""
        return (len(self.layout.levels) - 1).bit_length()

    def size(self, numbers: int) -> int:
        """Bytes that so many elements take in this type, whole blocks only."""
        return self.layout.size(numbers)

    def rounded(self, rows: Tensor) -> Tensor:
        """Round rows `[rows, in]` to an even grid per group, by whose errors types are compared before any is coded."""
        groups = rows.reshape(len(rows), -1, self.layout.group)
        most = 2**self.bits - 1
        if self.layout.has_minimum:
            low = groups.amin(-1, keepdim=True).clamp_max(0)
            step = ((groups.amax(-1, keepdim=True) - low) / most).clamp_min(_TINY)
            return (((groups - low) / step).round().clamp(0, most) * step + low).view_as(rows)
        half = 2 ** (self.bits - 1)
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        step = -largest / half
        step = torch.where(step.abs() < _TINY, torch.full_like(step, _TINY), step)
        return ((groups / step).round().clamp(-half, half - 1) * step).view_as(rows)


_TINY = torch.finfo(torch.float32).tiny
_K_QUANTS = tuple(map(FewBits, ("q2_K", "q3_K", "q4_K", "q5_K", "q6_K")))
_SHORT = tuple(map(FewBits, ("iq4_nl", "q5_0", "q5_1")))
_Q8 = FewBits("q8_0")
_LEAST = "head and embeddings keep more bits, routers and norms fp32"
_OUTSIDE = {HEAD: 6, EMBEDDINGS: 4}  # least bits, as in llama.cpp, of tensors that no gradients are measured of


def offered_types(tensor: GgufTensor, *, is_tied: bool) -> tuple[FewBits, ...]:
    """Types that llama-quantize may give to a tensor, the smallest first; none for a tensor that stays as it is."""
    columns = tensor.shape[-1]
    if tensor.is_always_wide:
        return ()
    if not tensor.has_inputs:  # nothing tells what errors in it cost
        return (_Q8,) if columns % 32 == 0 else ()
    types = (*_K_QUANTS, _Q8) if columns % 256 == 0 else (*_SHORT, _Q8) if columns % 32 == 0 else ()
    if (least := _OUTSIDE.get(HEAD if is_tied and tensor.name == EMBEDDINGS else tensor.name)) is not None:
        return next(((kind,) for kind in types if kind.bits >= least), ())
    return types


def rounding_losses(
    parts: Iterable[Tensor], types: Sequence[FewBits], given: Tensor, sensitivity: Tensor
) -> list[float]:
    """Estimated loss of rounding a tensor to each type on offer.

    Args:
        parts: its rows in order, those of one matrix each.
        types: of which at least one.
        given: `[matrices, in]`, how much the squared error of each input counts.
        sensitivity: `[matrices · out]`, how much the squared error of each output counts.
    """
    losses, start, height = torch.zeros(len(types), dtype=torch.float64), 0, len(sensitivity) // len(given)
    given, sensitivity = given.float(), sensitivity.float()
    for part in parts:
        for rows in part.to(given.device).float().split(max(1, _AT_ONCE // part.shape[-1])):
            weights = sensitivity[start : start + len(rows)]
            for index, kind in enumerate(types):
                lost = (kind.rounded(rows) - rows).square() @ given[start // height]
                losses[index] += float(weights.double() @ lost.double())
            start += len(rows)
    return losses.tolist()


def advisable(tensors: Sequence[GgufTensor]) -> Menu[FewBits]:
    """List the types that llama-quantize can be told to give to each tensor of a file."""
    is_tied = all(tensor.name != HEAD for tensor in tensors)
    offers = {tensor.name: offered_types(tensor, is_tied=is_tied) for tensor in tensors}
    return Menu(tensors, {name: types for name, types in offers.items() if types}, "llama.cpp", _LEAST)


def type_lines(chosen: Mapping[str, FewBits]) -> str:
    """The lines of llama-quantize's `--tensor-type-file`: patterns of names, and types."""
    return "".join(f"^{re.escape(name)}$={kind.name}\n" for name, kind in chosen.items())
