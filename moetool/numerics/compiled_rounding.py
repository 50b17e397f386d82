"""Rounding of numbers to codes, in torch or in C++, there after what errors of the inputs before add to them."""

import ctypes

import torch
from torch import Tensor

from moetool.compiled import compiler


class CompiledRounding:
    """Numbers that are rounded to levels of a table, or to whole numbers, under scales that groups of inputs share."""

    _starts: Tensor | None = None  # [n] int32, cells of the tables before each number's own
    _tables: tuple[Tensor, Tensor] | None = None  # of each cell the code uint8 and its level fp32

    def __init__(self, scales: Tensor, inverse: Tensor, first: float, last: float) -> None:
        """Round to whole numbers, unless tables are set.

        Args:
            scales: [groups, n] fp32.
            inverse: [groups, n] fp32, what numbers are multiplied by.
            first: the lowest whole number, whose code is 0; with tables the cell of the number zero.
            last: the highest whole number; with tables the last cell of each.
        """
        self._scales, self._inverse, self._first, self._last = scales, inverse, float(first), float(last)
        self._value = torch.empty_like(scales[0])

    def nearest(self, values: Tensor, group: int, codes: Tensor) -> Tensor:
        """Round `values` [n] under a group's scales to whole numbers: writes `codes` [n] uint8, returns the numbers
        that they stand for.

        The result is a buffer that the next call overwrites.
        """
        place = torch.mul(values, self._inverse[group], out=self._value).round_().clamp_(self._first, self._last)
        codes.copy_(place - self._first)
        return place.mul_(self._scales[group])

    @property
    def is_compiled(self) -> bool:
        """Whether `feed_back` serves here: on a processor for which the C++ could be compiled."""
        return self._scales.device.type == "cpu" and not compiler.problem()

    def feed_back(
        self, errors: Tensor, moved: Tensor, codes: Tensor, lost: Tensor, links: Tensor, pivots: Tensor, groups: Tensor
    ) -> None:
        """Round the numbers of consecutive inputs, each after what the errors of those before it add to it.

        Args:
            errors: [inputs, n] fp32, the numbers; their codes' values are subtracted.
            moved: [inputs, n] fp32, what is added to them; errors of inputs of this block are added here.
            codes: [inputs, n] uint8, written.
            lost: [n] fp32, to which what every input loses is added.
            links: [inputs, inputs] fp32, contiguous, upper triangular: how errors are passed on.
            pivots: [inputs] fp32, how squared errors count.
            groups: [inputs] int32, the rows of scales.
        """
        tables = [None, None] if self._tables is None else [table.data_ptr() for table in self._tables]
        compiler.library().moetool_round_to_levels(
            *map(ctypes.c_void_p, (errors.data_ptr(), moved.data_ptr(), codes.data_ptr(), lost.data_ptr())),
            *map(ctypes.c_long, errors.shape),
            ctypes.c_void_p(links.data_ptr()),
            ctypes.c_long(links.stride(0)),
            *map(ctypes.c_void_p, (pivots.data_ptr(), groups.data_ptr())),
            *map(ctypes.c_void_p, (self._scales.data_ptr(), self._inverse.data_ptr())),
            ctypes.c_void_p(None if self._starts is None else self._starts.data_ptr()),
            *map(ctypes.c_void_p, tables),
            ctypes.c_float(self._first),
            ctypes.c_float(self._last),
            ctypes.c_int(compiler.threads()),
        )
