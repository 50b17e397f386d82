"""The product of one token with a matrix in bf16, by the compiled C++ of this package."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from moetool.compiled.compiler import library, problem, threads

LANES = 16  # numbers of a vector
_SMALL = 1 << 15  # numbers of a matrix that one thread reads sooner than others could begin


def takes(inputs: Tensor, matrix: Tensor) -> bool:
    """Whether `linear` takes these, and is faster than torch: one token in bf16 on a processor, and no gradients."""
    return (
        inputs.numel() == matrix.shape[1] == inputs.shape[-1]
        and inputs.dtype == matrix.dtype == torch.bfloat16
        and inputs.device.type == matrix.device.type == "cpu"
        and type(inputs) is Tensor
        and type(matrix) is nn.Parameter  # not a view of codes, nor one spread over machines
        and matrix.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not problem()
    )


def linear(inputs: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of one token, summed in fp32 and rounded once: `[…, in]`, `[out, in]`, `[out]` → `[…, out]`."""
    inputs = inputs.contiguous()
    rows, columns = matrix.shape
    output = inputs.new_empty(*inputs.shape[:-1], rows)
    _kernel()(
        matrix.data_ptr(),
        None if bias is None else bias.data_ptr(),
        rows,
        columns,
        inputs.data_ptr(),
        output.data_ptr(),
        threads() if rows * columns > _SMALL else 1,
    )
    return output


@cache
def _kernel() -> Any:
    """The function of the library, told of its arguments once: to tell it with every call takes longer."""
    found, pointer, number = library().moetool_vector, ctypes.c_void_p, ctypes.c_long
    found.argtypes, found.restype = [pointer, pointer, number, number, pointer, pointer, ctypes.c_int], None
    return found
