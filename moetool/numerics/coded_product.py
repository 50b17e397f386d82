"""Products with a matrix of packed codes, in plain torch, without writing all of the matrix out.

Codes lie in planes (`numerics.packing`), so that a byte holds those of several rows in the same column. For a few
inputs it is looked up in a table of all that a byte can hold, which gives the levels of these rows as one wide number:
torch looks up a number of 8 bytes as fast as one of 2. What comes of a tile of bytes stays in the cache and is
multiplied at once, by inputs that are spread so that each row meets its own; scales are applied to the sums over
groups, of which there are few. For many inputs the rows of a byte are looked up one by one, and scaled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.numerics.packing import rows_served
from moetool.numerics.quantization import levels

_TILE = 1 << 20  # bytes of codes looked up at a time; of three bits, whose table is larger, less than half
_FEW = 16  # inputs up to which spreading them is faster than looking rows up one by one
LOOKED_UP_BITS = (1, 2, 3, 4, 8)  # bits of the codes that it knows
_WIDE = {4: torch.int32, 8: torch.int64, 16: torch.complex128}  # what is as many bytes


def can_multiply(bits: int, rows: int, dtype: torch.dtype) -> bool:
    """Whether `coded_product` knows a matrix of so many rows, and inputs of this dtype."""
    is_known = bits in LOOKED_UP_BITS and rows > 0 and rows % rows_served(bits) == 0
    return is_known and dtype in (torch.float32, torch.bfloat16, torch.float16)


def coded_product(packed: Tensor, scales: Tensor, bits: int, columns: int, inputs: Tensor) -> Tensor:
    """Inputs times the matrix [out, in] that codes and scales stand for: `[tokens, in]` → `[tokens, out]`.

    In bf16, sums over groups or scaled numbers are rounded once; all other sums are fp32.

    Args:
        packed: what `packing.pack` makes of the codes.
        scales: [out, groups].
        bits: of a code, 1, 2, 3, 4 or 8.
        columns: `in`.
        inputs: of a dtype that `can_multiply` names.
    """
    (rows, groups), tokens = scales.shape, len(inputs)
    if not tokens:
        return inputs.new_empty(0, rows)
    dtype = torch.bfloat16 if inputs.dtype == torch.bfloat16 else torch.float32  # sums of codes overflow in fp16
    inputs, asked = inputs.to(dtype), inputs.dtype
    stripes = rows_served(bits)
    height = rows // stripes
    output = torch.empty(tokens, stripes, height, device=inputs.device)
    factors = scales.view(-1, height, groups)
    step = min(height, max(1, (_TILE * 7 // 16 if bits == 3 else _TILE) // columns))
    grouped = inputs.T.reshape(groups, -1, tokens)
    for part in _parts(packed, bits, height, columns):
        scratch = _Scratch.of(step * columns, part.served, dtype, inputs.device)
        spread = _spread(grouped, part.served) if tokens <= _FEW else None
        for first in range(0, height, step):
            here = slice(first, min(first + step, height))
            own = factors[part.stripes, here]
            if spread is not None:
                sums = torch.bmm(part.levels(here, groups, scratch), spread).view(groups, -1, part.served, tokens)
                scaled = sums * own.float().permute(2, 1, 0).unsqueeze(3)
                output[:, part.stripes, here] = scaled.sum(0).permute(2, 1, 0)
            else:
                for target, factor, row in zip(
                    output[:, part.stripes, here].unbind(1), own, part.each(here, scratch), strict=True
                ):
                    row.view(*factor.shape, -1).mul_(factor.to(dtype).unsqueeze(2))
                    target.copy_(F.linear(inputs, row))
    output = output.view(tokens, rows)
    if bits == 8:  # whole numbers from -128 on were looked up, and codes mean those from -127 on
        output += grouped.float().sum(1).T @ scales.float().T
    return output.to(asked)


@dataclass(frozen=True, eq=False)
class _Scratch:
    """Memory that every tile is looked up in, so that it stays in the cache."""

    levels: Tensor
    index: Tensor
    beside: Tensor
    bytes: Tensor

    @classmethod
    def of(cls, count: int, served: int, dtype: torch.dtype, device: torch.device) -> "_Scratch":
        """Buffers for decoding `count` bytes of codes."""
        return cls(
            torch.empty(count * served, dtype=dtype, device=device),
            *(torch.empty(count, dtype=own, device=device) for own in (torch.int32, torch.int32, torch.uint8)),
        )


@dataclass(frozen=True, eq=False)
class _Part:
    """Bytes [height, in] that are looked up together, and which stripes' levels that gives."""

    bits: int
    codes: Tensor
    stripes: slice
    served: int
    beside: Tensor | None = None  # [height, in] the plane of third bits, where codes have three
    half: int = 0

    def levels(self, rows: slice, groups: int, scratch: _Scratch) -> Tensor:
        """The values of the rows, unscaled: [groups, rows, columns of a group * served]."""
        codes = self.codes[rows]
        group = codes.shape[1] // groups
        found = scratch.levels[: codes.numel() * self.served]
        if self.bits == 8:
            found.view(groups, -1, group).copy_(self._signed(codes, scratch).view(-1, groups, group).transpose(0, 1))
        else:
            pairs = self.bits == 4 and found.element_size() == 2 and group % 2 == 0
            wide = _wide_table(self.bits, self.half, pairs, found.dtype, codes.device)
            index = self._index(rows, groups, pairs, scratch)
            torch.index_select(wide, 0, index, out=found.view(wide.dtype))
        return found.view(groups, len(codes), -1)

    def each(self, rows: slice, scratch: _Scratch) -> Iterator[Tensor]:
        """The values of the rows stripe by stripe: [rows, columns], each in the place of the one before."""
        codes = self.codes[rows]
        found = scratch.levels[: codes.numel()]
        if self.bits == 8:
            yield found.copy_(self._signed(codes, scratch).view(-1)).view(codes.shape)
            return
        index = self._index(rows, 1, False, scratch)
        for table in _tables(self.bits, self.half, False, found.dtype, codes.device).T.contiguous():
            yield torch.index_select(table, 0, index, out=found).view(codes.shape)

    def _signed(self, codes: Tensor, scratch: _Scratch) -> Tensor:
        """Whole numbers from -128 on."""
        held = scratch.bytes[: codes.numel()].view(codes.shape)
        return torch.bitwise_xor(codes, 128, out=held).view(torch.int8)

    def _index(self, rows: slice, groups: int, pairs: bool, scratch: _Scratch) -> Tensor:
        """Where bytes (or pairs of them) are in their table; groups, which are multiplied one by one, come first."""
        codes = self.codes[rows]
        # In order into the cache first: groups lie far apart in memory.
        held = scratch.bytes[: codes.numel()].view(codes.shape).copy_(codes)
        cut = (held.view(torch.uint16) if pairs else held).view(len(codes), groups, -1).transpose(0, 1)
        index = scratch.index[: cut.numel()].view(cut.shape).copy_(cut)
        if self.beside is not None:
            torch.bitwise_and(self.beside[rows], 0x55 << self.half, out=held)
            index.add_(scratch.beside[: cut.numel()].view(cut.shape).copy_(cut), alpha=256)
        return index.view(-1)


def _parts(packed: Tensor, bits: int, height: int, columns: int) -> Iterator[_Part]:
    lines = packed.view(-1, columns)
    if bits not in (1, 3):
        yield _Part(bits, lines, slice(None), rows_served(bits))
        return
    for half in range(2):
        if bits == 1:
            yield _Part(1, lines, slice(4 * half, 4 * half + 4), 4, half=half)
        else:
            own = lines[half * height : (half + 1) * height]
            yield _Part(3, own, slice(half, None, 2), 4, lines[2 * height :], half)


def _spread(grouped: Tensor, served: int) -> Tensor:
    """Inputs [groups, group, tokens] for tiles in which `served` rows lie number by number beside each other: [groups,
    group * served, served * tokens], zero where a row is not the one that is asked for."""
    groups, group, tokens = grouped.shape
    spread = grouped.new_zeros(groups, group, served, served, tokens)
    spread.diagonal(dim1=2, dim2=3).copy_(grouped.unsqueeze(3))
    return spread.view(groups, group * served, served * tokens)


@cache
def _tables(bits: int, half: int, pairs: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The levels [indices, served] of the rows that a byte (of three bits: two bytes; or a pair of bytes) serves."""
    with torch.inference_mode(False):
        index = torch.arange(1 << (16 if bits == 3 or pairs else 8), device=device)[:, None]
        row = torch.arange(4 if bits < 4 or pairs else 2, device=device)
        if bits == 3:
            codes = (index >> (2 * row) & 3) | ((index >> (8 + half + 2 * row) & 1) << 2)
        else:
            codes = index >> (bits * row + 4 * half) & ((1 << bits) - 1)
        return levels(bits, dtype, device)[codes]


@cache
def _wide_table(bits: int, half: int, pairs: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The levels of each index as one number, whatever that is."""
    with torch.inference_mode(False):
        found = _tables(bits, half, pairs, dtype, device)
        return found.view(_WIDE[found.shape[1] * found.element_size()]).view(-1)
