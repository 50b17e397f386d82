"""Products with the matrices of a `Table`, and parts of them unpacked."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from moetool.representations.operand import Operand
from moetool.runtime.kernels.compiler import library
from moetool.runtime.kernels.table import NUMBERS, Table, operand_row


def routed(table: Table, chosen: Tensor, inputs: Tensor) -> Tensor:
    """Each input times the matrix that it chose, in fp32: `[pairs, in]` → `[pairs, out]`.

    A matrix is read once for every four inputs, and never written out. `chosen` [pairs] int64 names rows of the table;
    the result is zero where it names none.

    Raises:
        KernelProblem: there are no compiled kernels here.
    """
    rows, columns = table.shape
    pairs = len(chosen)
    chosen = chosen.to(torch.int64).contiguous()
    inputs = inputs.to(torch.float32).contiguous()
    outputs = torch.empty(pairs, rows)
    library().moetool_routed(
        ctypes.c_void_p(table.address),
        ctypes.c_long(len(table.products)),
        ctypes.c_void_p(chosen.data_ptr()),
        ctypes.c_long(pairs),
        ctypes.c_void_p(inputs.data_ptr()),
        ctypes.c_long(columns),
        ctypes.c_void_p(outputs.data_ptr()),
        ctypes.c_long(rows),
        ctypes.c_int(torch.get_num_threads()),
    )
    return outputs


class Unpacker:
    """A sum of stored matrices [rows, columns], e.g. of a base and a delta, a few rows of which are made at a time."""

    def __init__(self, operands: Sequence[Operand]) -> None:
        """None of them is transposed, and all are of one shape.

        Raises:
            UnsupportedMatrixError: a kernel cannot read one of them.
        """
        self.operands = list(operands)
        self._numbers = torch.tensor([operand_row(operand) for operand in operands], dtype=torch.int64)

    def rows(self, first: int, out: Tensor) -> Tensor:
        """The rows from `first` on into `out` [count, columns], of fp32, bf16 or fp16; rounded once.

        Raises:
            KernelProblem: there are no compiled kernels here.
        """
        library().moetool_unpack(
            ctypes.c_void_p(self._numbers.data_ptr()),
            ctypes.c_long(len(self.operands)),
            ctypes.c_long(first),
            ctypes.c_long(first + len(out)),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(NUMBERS[out.dtype]),
            ctypes.c_int(torch.get_num_threads()),
        )
        return out
