"""Products of tokens with the matrices of a `Table`."""

import ctypes
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.representations.operand import Operand, Products
from moetool.runtime.kernels.compiler import library
from moetool.runtime.kernels.table import NUMBERS, Table, operand_row

_PART = 1 << 20  # numbers of a matrix that are unpacked at a time: they stay in the cache until they are multiplied
_SCRATCH = threading.local()


def routed(table: Table, chosen: Tensor, inputs: Tensor) -> Tensor:
    """Each input times the matrix that it chose, in fp32: `[pairs, in]` → `[pairs, out]`. For few tokens.

    A matrix is read once for every four inputs, and never written out. `chosen` [pairs] int64 names rows of the table;
    the result is zero where it names none.
    """
    (rows, columns), pairs = table.shape, len(chosen)
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


def linear(products: Products, inputs: Tensor, out_features: int) -> Tensor:
    """Inputs times a matrix `[out, in]`, in their dtype: `[tokens, in]` → `[tokens, out]`. For many tokens.

    What has to be unpacked is unpacked in one, a part at a time; factors stay factors.
    """
    singles = [chain[0] for chain in products if len(chain) == 1]
    output: Tensor | None = None
    if is_packed(products):
        output = _unpacked_linear(singles, inputs)
        singles = []
    chains = [(single,) for single in singles] + [chain for chain in products if len(chain) > 1]
    for chain in chains:
        output = _add(output, _chain(chain, inputs))
    return inputs.new_zeros(len(inputs), out_features) if output is None else output


def is_packed(products: Products) -> bool:
    """Whether `linear` writes out all of the matrix on its way, so that another one can be added at no cost."""
    return any(len(chain) == 1 and chain[0].kind != "numbers" for chain in products)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


def _chain(chain: Sequence[Operand], inputs: Tensor) -> Tensor:
    for operand in chain:
        if operand.kind == "numbers":
            matrix = operand.data.to(inputs.dtype)
            inputs = inputs @ matrix if operand.transposed else F.linear(inputs, matrix)
        elif operand.transposed:
            inputs = inputs @ _unpacked(_numbers([operand]), 0, inputs.new_empty(operand.shape))
        else:
            inputs = _unpacked_linear([operand], inputs)
    return inputs


def _unpacked_linear(operands: Sequence[Operand], inputs: Tensor) -> Tensor:
    """Inputs times the sum of stored matrices of one shape, none of them transposed."""
    rows, columns = operands[0].shape
    step = max(1, min(rows, _PART // columns))
    scratch = _scratch(step * columns, inputs.dtype).view(step, columns)
    output = inputs.new_empty(len(inputs), rows)
    numbers = _numbers(operands)
    for first in range(0, rows, step):
        part = _unpacked(numbers, first, scratch[: rows - first])
        output[:, first : first + len(part)] = F.linear(inputs, part)
    return output


def _numbers(operands: Sequence[Operand]) -> Tensor:
    return torch.tensor([operand_row(operand) for operand in operands], dtype=torch.int64)


def _unpacked(numbers: Tensor, first: int, out: Tensor) -> Tensor:
    """The rows from `first` on of the sum of operands, into `out` [count, columns]; rounded once."""
    library().moetool_unpack(
        ctypes.c_void_p(numbers.data_ptr()),
        ctypes.c_long(len(numbers)),
        ctypes.c_long(first),
        ctypes.c_long(first + len(out)),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(NUMBERS[out.dtype]),
        ctypes.c_int(torch.get_num_threads()),
    )
    return out


def _scratch(count: int, dtype: torch.dtype) -> Tensor:
    """Memory of this thread's own for `count` numbers, kept: making room afresh takes longer than filling it."""
    held: dict[torch.dtype, Tensor] = _SCRATCH.__dict__.setdefault("held", {})
    if dtype not in held or held[dtype].numel() < count:
        with torch.inference_mode(False):
            held[dtype] = torch.empty(max(count, _PART), dtype=dtype)
    return held[dtype][:count]
