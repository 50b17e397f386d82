"""Attention of one token of each sequence to cached keys, by the compiled C++ of this package."""

import ctypes

import torch
from torch import Tensor

from moetool.compiled.compiler import library, problem, threads
from moetool.kernels.operands import NUMBERS

_LANES = 16  # numbers of a vector: widths are multiples of it
_SMALL = 1 << 15  # numbers of keys that one thread reads sooner than others could begin


class _Cached(ctypes.Structure):
    """Cached keys or values as the struct `Cached` of attention.cpp has them: address, and strides in numbers."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    )


class _Attention(ctypes.Structure):
    """Operands of one call as the struct `Attention` of attention.cpp has them."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("numbers", "batch", "heads", "groups", "length", "width", "values")),
        ("queries", ctypes.c_void_p),
        ("key", _Cached),
        ("value", _Cached),
        ("bias", ctypes.c_void_p),
        ("biased", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("out", ctypes.c_void_p),
    )


def attends(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` takes these, and is faster than torch: one token per sequence, on a processor, in 16 bits."""
    return (
        query.shape[2] == 1
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.device.type == key.device.type == value.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[1:3] == value.shape[1:3]
        and query.shape[3] == key.shape[3]
        and query.shape[1] % key.shape[1] == 0
        and key.shape[3] % _LANES == value.shape[3] % _LANES == 0
        and key.stride(3) == value.stride(3) == 1
        and (mask is None or (mask.shape[1:3] == (1, 1) and mask.shape[3] == key.shape[2]))
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        and not problem()
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax of scaled products with the keys, times the values, summed in fp32 and rounded once.

    Args:
        query: [batch, heads, 1, width].
        key: [batch, heads of keys, length, width]; each is for as many heads of queries that follow each other.
        value: [batch, heads of keys, length, width of values].
        mask: [batch or 1, 1, 1, length], true where there is something to attend to, or what is added to scores.
            Where there is nothing at all, the result is zero.
        scale: of products.

    Returns:
        [batch, heads, width of values].
    """
    batch, heads, length, width = key.shape
    query = query.reshape(batch, query.shape[1], width).contiguous()
    bias = None if mask is None else _added(mask)
    output = query.new_empty(batch, query.shape[1], value.shape[3])
    own = _Attention(
        *(NUMBERS[query.dtype], batch, heads, query.shape[1] // heads, length, width, value.shape[3]),
        query.data_ptr(),
        _cached(key),
        _cached(value),
        None if bias is None else bias.data_ptr(),
        0 if bias is None or len(bias) == 1 else length,
        scale,
        output.data_ptr(),
    )
    count = threads() if key.numel() > _SMALL else 1
    library().moetool_attend(ctypes.byref(own), ctypes.c_int(count))
    return output


def _added(mask: Tensor) -> Tensor:
    """What a mask adds to scores, [batch or 1, length] fp32."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return mask.reshape(-1, mask.shape[3]).float().contiguous()


def _cached(states: Tensor) -> _Cached:
    return _Cached(states.data_ptr(), *states.stride()[:3])
