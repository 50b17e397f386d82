"""Numbers of few bits in bytes and words, as other tools lay them out."""

from functools import cache

import torch
from torch import Tensor

_TOGETHER = {1: torch.float32, 2: torch.complex64, 4: torch.complex128}


def looked_up(held: Tensor, table: Tensor) -> Tensor:
    """Numbers `[rows, columns · n]` in fp32 that bytes `[rows, columns]` stand for, by a table `[256, n]`, n 1, 2 or 4.

    A row of the table is looked up as one number as wide as that: row by row it would take three times as long.
    """
    rows = table.view(-1).view(_TOGETHER[table.shape[1]])
    found = rows.index_select(0, held.reshape(-1).int())
    return found.view(torch.float32).view(held.shape[0], -1)


def table_of_halves(levels: Tensor) -> Tensor:
    """The table `[256, 2]` of bytes that hold two numbers, each of which is one of 16 levels `[16]`, the high half
    first."""
    every = torch.arange(256)
    return torch.stack([levels.float()[every >> 4], levels.float()[every & 15]], 1)


@cache
def _table_of_integers(bits: int) -> Tensor:
    """The table `[256, 8 / bits]` of whole numbers without sign, the lowest bits first."""
    shifts = torch.arange(0, 8, bits)
    return ((torch.arange(256)[:, None] >> shifts) & (2**bits - 1)).float()


def integers(words: Tensor, bits: int) -> Tensor:
    """Whole numbers of 2, 3, 4, 5, 6 or 8 bits without sign, `[rows, columns · 32 / bits]` in fp32, in contiguous words
    of 32 bits `[rows, columns]`: the lowest bits first, from one word on into the next (3 bits: 3 words are 32). Of 3,
    5 and 6 bits a row has whole bytes for every eight numbers."""
    held = words.view(-1).view(torch.uint8).view(len(words), -1)
    if 8 % bits == 0:
        return looked_up(held, _table_of_integers(bits))
    # Eight numbers are in as many bytes as a number has bits.
    each = held.view(len(held), -1, bits).to(torch.int32 if bits == 3 else torch.int64)
    joined = each[:, :, 0].clone()
    for place in range(1, bits):
        joined |= each[:, :, place] << 8 * place
    numbers = torch.empty(*joined.shape, 8)
    for place in range(8):
        numbers[:, :, place] = joined >> bits * place & (1 << bits) - 1
    return numbers.flatten(1)
