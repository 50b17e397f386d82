"""Products with stored matrices on a CPU, by the compiled C++ of this directory."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor

from moetool.compiled.compiler import library, threads
from moetool.kernels import rounding
from moetool.kernels.operands import NUMBERS, operand_row
from moetool.kernels.table import Table
from moetool.representations.operand import Operand

_PART = 1 << 22  # numbers of a matrix that are unpacked at a time: enough for a product, and not many more
_SCRATCH = threading.local()


def routed(table: Table, chosen: Tensor, inputs: Tensor) -> Tensor:
    """See `products.routed`. A matrix is read once for every four inputs, and never written out."""
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
        ctypes.c_int(threads()),
        ctypes.c_int(rounding.is_allowed()),
    )
    return outputs


def unpacked_linear(operands: Sequence[Operand], inputs: Tensor) -> Tensor:
    """Inputs times the sum of stored matrices of one shape, none of them transposed, of which a part is unpacked at a
    time: `[tokens, in]` → `[tokens, out]`."""
    numbers = _numbers(operands)
    if not multiplies(inputs.dtype):
        return _part_by_part(partial(_unpacked, numbers), operands[0].shape, inputs)
    inputs = inputs.contiguous()
    output = inputs.new_empty(len(inputs), operands[0].shape[0])
    library().moetool_multiply(
        ctypes.c_void_p(numbers.data_ptr()),
        ctypes.c_long(len(numbers)),
        ctypes.c_void_p(inputs.data_ptr()),
        ctypes.c_long(len(inputs)),
        ctypes.c_void_p(output.data_ptr()),
        ctypes.c_int(threads()),
    )
    return output


def multiplies(dtype: torch.dtype) -> bool:
    """Whether kernels unpack and multiply in one, a part in the cache at a time: the processor has products of bf16."""
    return dtype == torch.bfloat16 and multiplies_by() is not None


def multiplies_by() -> Literal["AVX-512", "AMX"] | None:
    """The instructions by which kernels multiply in bf16; `None` where the processor has neither."""
    found: tuple[Literal["AVX-512", "AMX"] | None, ...] = (None, "AVX-512", "AMX")
    return found[library().moetool_multiplies()]


def built_for() -> str:
    """What the kernels were compiled for: instructions, and whether they know threads."""
    kernels = library()
    kernels.moetool_built_for.restype = ctypes.c_char_p
    name: bytes = kernels.moetool_built_for()
    return name.decode()


def converted_linear(inputs: Tensor, matrix: Tensor) -> Tensor:
    """Inputs times a matrix of another dtype, of which a part is converted at a time: `[tokens, in]`, `[out, in]` →
    `[tokens, out]` in the dtype of the inputs, not contiguous."""

    def fill(first: int, out: Tensor) -> None:
        out.copy_(matrix[first : first + len(out)])

    return _part_by_part(fill, (matrix.shape[0], matrix.shape[1]), inputs)


@cache
def lacks_products(dtype: torch.dtype) -> bool:
    """Whether this processor has no instructions for products in a 16-bit dtype, as one with AVX2 alone: torch then
    multiplies number by number, at an eighth of the speed of fp32."""
    probes = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    supports = getattr(torch.ops.mkldnn, probes.get(dtype, ""), None)
    return supports is not None and not supports()


def _part_by_part(fill: Callable[[int, Tensor], object], shape: tuple[int, int], inputs: Tensor) -> Tensor:
    """Inputs times a matrix `shape`, by torch's own products, in the dtype of the inputs: `[tokens, in]` → `[tokens,
    out]`, not contiguous.

    Args:
        fill: writes the rows of the matrix that begin with one of these into a tensor.
        shape: of the matrix.
        inputs: of the product.
    """
    rows, columns = shape
    step = max(1, min(rows, _PART // columns))
    scratch = _scratch(step * columns, inputs.dtype).view(step, columns)
    output = inputs.new_empty(rows, len(inputs))
    for first in range(0, rows, step):
        part = scratch[: rows - first]
        fill(first, part)
        # The part comes first: oneDNN takes up to half the time then, since rows are many and tokens are few.
        torch.mm(part, inputs.t(), out=output[first : first + len(part)])
    return output.t()


def unpacked(operand: Operand, dtype: torch.dtype) -> Tensor:
    """The matrix `[rows, columns]` that an operand stands for, in `dtype`."""
    return _unpacked(_numbers([operand]), 0, torch.empty(operand.shape, dtype=dtype))


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
        ctypes.c_int(threads()),
    )
    return out


def _scratch(count: int, dtype: torch.dtype) -> Tensor:
    """Memory of this thread's own for `count` numbers, kept: making room afresh takes longer than filling it."""
    held: dict[torch.dtype, Tensor] = _SCRATCH.__dict__.setdefault("held", {})
    if dtype not in held or held[dtype].numel() < count:
        with torch.inference_mode(False):
            held[dtype] = torch.empty(max(count, _PART), dtype=dtype)
    return held[dtype][:count]
