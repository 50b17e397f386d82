"""Inputs times a matrix of which few elements are stored; training keeps the elements and never the matrix."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moetool.numerics.sampling import scatter

_RARE = 100  # on two cores gathering takes less time than the dense product from one element in 60 to 100 on
_BLOCK = 1 << 22  # numbers held at a time


def sparse_linear(inputs: Tensor, values: Tensor, indices: Tensor, shape: tuple[int, int]) -> Tensor:
    """`inputs @ W.T` for W [out, in], zero but for `values` at `indices`. Differentiable once.

    For the backward only the arguments are kept. The gradient with respect to `values` is that of W at `indices`. On a
    CPU, and where at most 1 % of W is stored, neither W nor its gradient is formed; elsewhere one of them at a time is,
    and let go at once: sums of gathered columns have no fixed order on other devices.

    Args:
        inputs: [tokens, in], floating; the dtype of the product. Sums are accumulated in fp32 at least.
        values: [k], floating.
        indices: [k] int32, ascending positions in the flattened matrix.
        shape: (out, in).

    Returns:
        [tokens, out] in the dtype of `inputs`, or in autocast's where that is on.
    """
    device = inputs.device.type
    if torch.is_autocast_enabled(device) and inputs.dtype != torch.float64:
        inputs = inputs.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        product: Tensor = _SparseLinear.apply(inputs, values, indices, shape)
    return product


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(inputs: Tensor, values: Tensor, indices: Tensor, shape: tuple[int, int]) -> Tensor:
        if not _is_gathered(inputs, values, shape):
            return F.linear(inputs, _matrix(values, indices, shape, inputs.dtype))
        rows, columns = _positions(indices, shape)
        return _gathered(inputs, values, columns, rows, shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, tuple[int, int]], output: Tensor) -> None:
        tokens, values, indices, ctx.shape = inputs
        needs_inputs = tokens if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(needs_inputs, values, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        inputs, values, indices = ctx.saved_tensors
        shape = ctx.shape
        by_inputs = by_values = None
        if _is_gathered(gradient, values, shape):
            rows, columns = _positions(indices, shape)
            if ctx.needs_input_grad[0]:
                by_inputs = _gathered(gradient, values, rows, columns, shape[1])
            if ctx.needs_input_grad[1]:
                by_values = _dots(gradient, inputs, rows, columns).to(values.dtype)
        else:
            if ctx.needs_input_grad[0]:
                by_inputs = gradient @ _matrix(values, indices, shape, gradient.dtype)
            if ctx.needs_input_grad[1]:
                by_values = (gradient.T @ inputs).view(-1)[indices.long()].to(values.dtype)
        return by_inputs, by_values, None, None


def _is_gathered(inputs: Tensor, values: Tensor, shape: tuple[int, int]) -> bool:
    return inputs.device.type == "cpu" and len(values) * _RARE <= shape[0] * shape[1]


def _matrix(values: Tensor, indices: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return scatter(values.to(dtype), indices, values.new_empty(shape[0] * shape[1], dtype=dtype)).view(shape)


def _positions(indices: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Row and column of every stored element."""
    flat = indices.long()
    return flat // shape[1], flat % shape[1]


def _wide(inputs: Tensor) -> Tensor:
    """Transposed, so that a column is one stretch of memory: [columns, tokens], in fp32 at least."""
    return inputs.T.to(torch.promote_types(inputs.dtype, torch.float32)).contiguous()


def _block(tokens: int) -> int:
    return max(1, _BLOCK // max(1, tokens))


def _gathered(inputs: Tensor, values: Tensor, source: Tensor, target: Tensor, width: int) -> Tensor:
    """[tokens, width]: columns `source` of the inputs times `values`, added up in the columns `target`."""
    wide, size = _wide(inputs), _block(len(inputs))
    total = wide.new_zeros(width, len(inputs))
    for start in range(0, len(values), size):
        part = slice(start, start + size)
        total.index_add_(0, target[part], wide[source[part]] * values[part, None].to(wide.dtype))
    return total.T.contiguous().to(inputs.dtype)


def _dots(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """[k]: for every stored element the inner product over tokens of a column of `left` and one of `right`."""
    left_wide, right_wide, size = _wide(left), _wide(right), _block(len(left))
    parts = [
        (left_wide[rows[start : start + size]] * right_wide[columns[start : start + size]]).sum(1)
        for start in range(0, len(rows), size)
    ]
    return torch.cat(parts)
