"""Experts of a layer on a few tokens in one call of the compiled C++."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moetool.compiled.compiler import library, threads
from moetool.kernels import rounding
from moetool.kernels.operands import NUMBERS
from moetool.kernels.table import Table


class _Block(ctypes.Structure):
    """As block.cpp has it."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("roles", ctypes.c_int64),
        ("experts", ctypes.c_int64),
        ("is_based", ctypes.c_int64 * 2),
        ("uses", ctypes.c_void_p),
        ("hidden", ctypes.c_int64),
        ("inner", ctypes.c_int64),
    )


class Block:
    """Experts with silu between their matrices and without biases, on a processor.

    Valid as long as the matrices of both tables are where they are.
    """

    def __init__(self, first: Table, second: Table, bases: tuple[bool, bool], uses_base: Sequence[Tensor]) -> None:
        """Note where everything lies.

        Args:
            first: the gates of all experts, and then the base; after these `up` in the same way; or `up` alone.
            second: `down` in the same way.
            bases: whether the base is there, in the first and in the second table.
            uses_base: [experts, 1] fp32 by role, as the tables have them: 1 for a delta to the base, 0 for a matrix.
        """
        self._tables = first, second
        self._uses = torch.cat([uses.reshape(-1) for uses in uses_base]).contiguous()
        experts = len(uses_base[0])
        self._block = _Block(
            first.address,
            second.address,
            len(uses_base) - 1,
            experts,
            (ctypes.c_int64 * 2)(*bases),
            None if bool(self._uses.all()) else self._uses.data_ptr(),
            first.shape[1],
            first.shape[0],
        )
        self.address = ctypes.addressof(self._block)  #: of the struct `Block` of block.cpp

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what the chosen experts give: `[tokens, hidden]`, `[tokens, k]`, `[tokens, k]` →
        `[tokens, hidden]`, in the dtype of `hidden` if kernels know that, else in fp32. Numbers of experts that are not
        here count as nothing."""
        hidden, weights = _read(hidden), _read(weights)
        chosen = chosen.to(torch.int64).contiguous()
        output = torch.empty_like(hidden)
        _kernel()(
            self.address,
            hidden.data_ptr(),
            NUMBERS[hidden.dtype],
            chosen.data_ptr(),
            weights.data_ptr(),
            NUMBERS[weights.dtype],
            *chosen.shape,
            output.data_ptr(),
            threads(),
            rounding.is_allowed(),
        )
        return output


def _read(values: Tensor) -> Tensor:
    """Numbers as kernels read them, one after the other."""
    return (values if values.dtype in NUMBERS else values.float()).contiguous()


@cache
def _kernel() -> Any:
    """The function of the library, told of its arguments once."""
    found, pointer, number = library().moetool_block, ctypes.c_void_p, ctypes.c_long
    form, switch = ctypes.c_int64, ctypes.c_int
    found.argtypes = [pointer, pointer, form, pointer, pointer, form, number, number, pointer, switch, switch]
    found.restype = None
    return found
