"""Kernel launches on a card for a table of operands: one for every kind of operand in it.

What is the same for all operands of a kind is known when a kernel is compiled; where they lie, and which experts have
one, stands in a table on the card. So nothing on the host depends on what tokens have chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moetool.kernels.forms import decoder
from moetool.kernels.operands import (
    ADDED,
    FIELDS,
    FORMS,
    MOST_NUMBERS,
    OPERANDS,
    TERMS,
    UnsupportedMatrixError,
    operand_levels,
    operand_row,
)
from moetool.numerics import trellis
from moetool.numerics.packing import rows_served
from moetool.representations.operand import Operand, Products, by_positions

SLOTS = OPERANDS * TERMS
COLUMNS, COLUMNS_TRANSPOSED = 128, 32  # of a tile: what a kernel reads at a time
_LEVELS = FIELDS - 3  # where levels stand in a row, and the first values of rows of a sparse matrix


@dataclass(frozen=True, order=True)
class OperandKind:
    """Properties of an operand that its kernel is compiled for.

    Attributes:
        form, numbers: of what is stored, and of scales or values (operands.py).
        name: of a form that is a file of its own, else nothing.
        served: rows that one byte of codes serves, if rows can be cut into as many stripes; else 1.
        is_aligned: addresses of rows are multiples of 16, and rows of codes lie in whole stripes.
        is_whole: a tile lies in one group of columns.
        transposed: as in `Operand`.
        is_placed: whether its outputs have other places than their own order.
    """

    form: int
    numbers: int
    served: int
    is_aligned: bool
    is_whole: bool
    transposed: bool
    is_placed: bool
    name: str = ""

    @property
    def decode(self) -> Any:
        """The function of Triton by which its numbers are decoded, if it is a file of its own."""
        return decoder(self.name) if self.name else None


@dataclass(frozen=True)
class Launch:
    """One kernel, for those matrices of a table that have this kind of operand in this place.

    Attributes:
        number: by which the operands in the table are known.
        stage: 0 for what comes first in a chain, the number of its term for what adds to the output; in this order.
        slot: place among the operands of a matrix.
        is_first, is_last: in a chain of two; neither where an operand stands alone.
        extent: the most rows that one has, or columns if transposed.
    """

    number: int
    stage: int
    slot: int
    is_first: bool
    is_last: bool
    kind: OperandKind
    extent: int


class Launches:
    """Launches the Triton kernels of all products of a table.

    Attributes:
        steps: in order.
        numbers: [matrices, slots, fields] int64 on the device: rows as in operands.py, with the number of a launch (or
            0 for none) instead of the form.
        inner: the most numbers between the two operands of a chain.
    """

    def __init__(self, products: Sequence[Products], device: torch.device) -> None:
        """Raises `UnsupportedMatrixError` for a matrix that is too large."""
        found: dict[tuple[int, int, bool, bool, OperandKind], list[tuple[int, Operand]]] = {}
        for matrix, own in enumerate(products):
            for term, chain in enumerate(own):
                for place, operand in enumerate(chain):
                    is_first, is_last = len(chain) > 1 and place == 0, place == 1
                    key = (0 if is_first else 1 + term, OPERANDS * term + place, is_first, is_last, kind(operand))
                    found.setdefault(key, []).append((matrix, operand))
        rows = torch.zeros(len(products), SLOTS, FIELDS, dtype=torch.int64)
        self._kept: list[Tensor] = []
        steps = []
        for number, (key, members) in enumerate(sorted(found.items(), key=lambda item: item[0]), 1):
            extent = max(operand.outputs for _, operand in members)
            steps.append(Launch(number, *key, extent))
            for matrix, operand in members:
                rows[matrix, key[1]] = torch.tensor(self._row(number, operand))
        self.steps = tuple(steps)
        self.numbers = rows.to(device)
        self.inner = max((step.extent for step in steps if step.is_first), default=0)

    def _row(self, number: int, operand: Operand) -> list[int]:
        if operand.kind == "sparse":
            operand = by_positions(operand)
            self._kept += [operand.scales] if operand.scales is not None else []
        row, levels = [number, *operand_row(operand)[1:]], card_levels(operand)
        if levels is not None:
            row[_LEVELS] = levels.data_ptr()
        if operand.kind == "sparse":
            self._kept.append(row_starts(operand))
            row[_LEVELS] = self._kept[-1].data_ptr()
        return row


def kind(operand: Operand) -> OperandKind:
    """Key of a compiled kernel: the properties that it is specialised to.

    Raises:
        UnsupportedMatrixError: no kernel is.
    """
    form, rows, columns, group, transposed, data, _, numbers, *_ = operand_row(operand)
    if rows * columns >= MOST_NUMBERS:
        raise UnsupportedMatrixError(
            f"a matrix has {rows} × {columns} numbers; kernels of cards know up to {MOST_NUMBERS}"
        )
    if form == FORMS["sparse"]:
        if transposed:
            raise UnsupportedMatrixError("a sparse matrix is transposed")
        return OperandKind(form, numbers, 1, False, False, False, False)
    name = operand.kind if form >= ADDED else ""
    if name and decoder(name) is None:
        raise UnsupportedMatrixError(f"no kernel of cards reads '{name}'")
    stripes = rows_served(operand.bits) if operand.kind in ("codes", "trellis") else 1
    served = stripes if rows % stripes == 0 else 1
    aligned = columns % 16 == 0 and served == stripes and data % 16 == 0
    whole = group == columns or group % (COLUMNS_TRANSPOSED if transposed else COLUMNS) == 0
    return OperandKind(form, numbers, served, aligned, whole, bool(transposed), operand.places is not None, name)


def card_levels(operand: Operand) -> Tensor | None:
    """See `operand_levels`; what windows of a trellis stand for is [256] bf16, half as many lines of a cache."""
    if operand.kind == "trellis":
        return _trellis_levels(operand.bits, operand.data.device)
    return operand_levels(operand)


@cache
def _trellis_levels(bits: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return trellis.values(bits, device).bfloat16()


def row_starts(operand: Operand) -> Tensor:
    """Where the values of every row of a sparse matrix begin, and where the last ends: [rows + 1] int32."""
    assert operand.scales is not None
    rows, columns = operand.shape
    ends = torch.arange(rows + 1, dtype=torch.int64, device=operand.data.device) * columns
    return torch.searchsorted(operand.scales.to(torch.int64), ends).int()
