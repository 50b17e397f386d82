"""Choice of a type for each tensor of a file, by the estimated loss of each type.

Where llama-quantize will code the tensors, losses are measured on an even grid with as many bits, and as many numbers
per scale. llama.cpp's own search for scales loses less, for all types about alike. `own_types` measures the losses of
codes that moetool chooses. Types for rows that are no whole super-blocks are those of llama-quant.cpp.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from moetool.compress.budget.items import Group, offered
from moetool.compress.budget.spending import allocate
from moetool.errors import UsageError
from moetool.export.gguf.file import GgufTensor
from moetool.format.gguf.blocks import BLOCK_TYPES, BlockType
from moetool.format.gguf.words import EMBEDDINGS, HEAD, layer_of

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


KindT = TypeVar("KindT", FewBits, BlockType)


@dataclass(frozen=True)
class Menu(Generic[KindT]):
    """The types on offer for the tensors of a file.

    Attributes:
        tensors: all tensors of the file.
        types: those on offer by the tensor's name, the smallest first; tensors that stay as they are have no entry.
    """

    tensors: Sequence[GgufTensor]
    types: Mapping[str, tuple[KindT, ...]]

    def nbytes(self, chosen: Mapping[str, KindT]) -> int:
        """Bytes of all tensors of the file with the types that were chosen, without padding."""
        return sum(
            chosen[tensor.name].size(tensor.numbers) if tensor.name in chosen else tensor.nbytes
            for tensor in self.tensors
        )

    @cached_property
    def numbers(self) -> int:
        """Number of elements that all tensors of the file have together."""
        return sum(tensor.numbers for tensor in self.tensors)

    def bits_per_weight(self, chosen: Mapping[str, KindT]) -> float:
        """The bits per number over all tensors, as llama.cpp tells it."""
        return 8 * self.nbytes(chosen) / self.numbers

    @property
    def smallest(self) -> dict[str, KindT]:
        """Choose the smallest type on offer for each tensor."""
        return {name: types[0] for name, types in self.types.items()}

    @property
    def largest(self) -> dict[str, KindT]:
        """Choose the largest type on offer for each tensor."""
        return {name: types[-1] for name, types in self.types.items()}

    def budget(self, target: float) -> int:
        """Bytes of all tensors at so many bits per weight. Raises `UsageError` where no types are that small."""
        least, most = (self.bits_per_weight(chosen) for chosen in (self.smallest, self.largest))
        if least > target:
            raise UsageError(
                f"--target-bpw {target:g} is less than this model can have: head and embeddings keep more bits, "
                f"routers and norms fp32. With the largest types on offer it has {most:.2f} bits per weight, with the "
                f"smallest types {math.ceil(100 * least) / 100:.2f}."
            )
        return int(target / 8 * self.numbers)

    def choose(self, budget: int, losses: Mapping[str, Sequence[float]]) -> dict[str, KindT]:
        """The types with which a file whose tensors take at most `budget` bytes loses least (`compress.budget`).

        Args:
            budget: bytes, no fewer than the smallest types take.
            losses: by name, of each type; those of a tensor with one type may be missing.
        """
        open_ = [tensor for tensor in self.tensors if len(self.types.get(tensor.name, ())) > 1]
        items = {
            (layer_of(tensor.name), tensor.name, 0): offered(
                types, [kind.size(tensor.numbers) for kind in types], losses[tensor.name]
            )
            for tensor in open_
            for types in [self.types[tensor.name]]
        }
        fixed = self.nbytes(self.smallest) - sum(int(item.nbytes[0]) for item in items.values())
        found = allocate("water-filling", [Group(items)], budget - fixed)
        return self.smallest | {name: kind for (_, name, _), kind in found.items()}


def advisable(tensors: Sequence[GgufTensor]) -> Menu[FewBits]:
    """List the types that llama-quantize can be told to give to each tensor of a file."""
    is_tied = all(tensor.name != HEAD for tensor in tensors)
    offers = {tensor.name: offered_types(tensor, is_tied=is_tied) for tensor in tensors}
    return Menu(tensors, {name: types for name, types in offers.items() if types})


def type_lines(chosen: Mapping[str, FewBits]) -> str:
    """The lines of llama-quantize's `--tensor-type-file`: patterns of names, and types."""
    return "".join(f"^{re.escape(name)}$={kind.name}\n" for name, kind in chosen.items())


def counted_types(chosen: Mapping[str, KindT]) -> str:
    """Describe how many tensors have each type, the most frequent first: `12 q4_K, 4 q6_K`."""
    return ", ".join(f"{count} {name}" for name, count in Counter(kind.name for kind in chosen.values()).most_common())
