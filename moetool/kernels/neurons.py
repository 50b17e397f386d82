"""Products of a few tokens with the rows of a matrix that each of them chose, by the compiled C++ of this package."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moetool.compiled.compiler import library, problem, threads
from moetool.kernels.operands import NUMBERS


def takes(matrix: Tensor) -> bool:
    """Whether there are kernels for a matrix of numbers, `[rows, columns]`: one row after the other in memory."""
    return matrix.device.type == "cpu" and matrix.dtype in NUMBERS and matrix.is_contiguous() and not problem()


def chosen_dots(matrix: Tensor, chosen: Tensor, inputs: Tensor) -> Tensor:
    """Each token times the rows that it chose, in fp32: `[rows, columns]`, `[tokens, k]` int64 and `[tokens, columns]`
    → `[tokens, k]`. Rows must be there: nothing checks them."""
    outputs = torch.empty(chosen.shape)
    _run("moetool_chosen_dots", matrix, chosen, inputs, outputs)
    return outputs


def chosen_sum(matrix: Tensor, chosen: Tensor, values: Tensor) -> Tensor:
    """The sum of the rows that each token chose, each times its value, in fp32: `[rows, columns]`, `[tokens, k]` int64
    and `[tokens, k]` → `[tokens, columns]`. Rows must be there: nothing checks them."""
    outputs = torch.empty(len(chosen), matrix.shape[1])
    _run("moetool_chosen_sum", matrix, chosen, values, outputs)
    return outputs


def _run(name: str, matrix: Tensor, chosen: Tensor, numbers: Tensor, outputs: Tensor) -> None:
    chosen, numbers = chosen.contiguous(), numbers.to(torch.float32).contiguous()
    _kernel(name)(
        matrix.data_ptr(),
        NUMBERS[matrix.dtype],
        matrix.shape[1],
        chosen.data_ptr(),
        chosen.shape[1],
        numbers.data_ptr(),
        len(chosen),
        outputs.data_ptr(),
        threads(),
    )


@cache
def _kernel(name: str) -> Any:
    found, pointer, number = getattr(library(), name), ctypes.c_void_p, ctypes.c_long
    found.argtypes = [pointer, number, number, pointer, number, pointer, number, pointer, ctypes.c_int]
    found.restype = None
    return found
