"""A layer around its experts, for one token, in one call of the compiled C++ of this package."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moetool.compiled.compiler import library, threads
from moetool.kernels import rounding
from moetool.kernels.self_attention import (
    CacheRoom,
    Projected,
    Projection,
    RootMeanSquare,
    SelfAttention,
    SelfAttentionStruct,
)
from moetool.representations.operand import numbers


class _Layer(ctypes.Structure):
    """As projected.cpp has it."""

    _fields_ = (
        ("attention", SelfAttentionStruct),
        ("before", ctypes.c_void_p),
        ("after", ctypes.c_void_p),
        ("before_epsilon", ctypes.c_float),
        ("after_epsilon", ctypes.c_float),
        ("router", Projection),
        ("chosen", ctypes.c_int64),
        ("normalizes", ctypes.c_int64),
    )


@dataclass(frozen=True)
class TopKRouting:
    """A router `[experts, hidden]` in bf16 that gives every token the softmax's largest.

    Attributes:
        top_k: experts of a token.
        normalizes: their weights add up to 1.
        dtype: of the weights.
    """

    matrix: Tensor
    top_k: int
    normalizes: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Around:
    """What a layer gives one token before its experts.

    Attributes:
        stream: [1, 1, hidden], what the experts' sum is added to.
        normed: [1, 1, hidden], what they are given.
        chosen: [1, k] int64 and
        weights: [1, k], by the router; None without one.
    """

    stream: Tensor
    normed: Tensor
    chosen: Tensor | None
    weights: Tensor | None


class TokenLayer:
    """Norm, attention, a second norm and the router of a layer. Valid as long as its tensors are where they are."""

    def __init__(
        self, attention: SelfAttention, before: RootMeanSquare, after: RootMeanSquare, routing: TopKRouting | None
    ) -> None:
        """Note where everything lies; `before` and `after` are the norms before and after attention."""
        self.routing = routing
        router = Projection() if routing is None else Projected(numbers(routing.matrix), None).structure()
        self._own = _Layer(
            attention.structure,
            before.weight.data_ptr(),
            after.weight.data_ptr(),
            before.epsilon,
            after.epsilon,
            router,
            0 if routing is None else routing.top_k,
            routing is not None and routing.normalizes,
        )
        self.address = ctypes.addressof(self._own)  #: of the struct `Layer` of projected.cpp

    def __call__(self, hidden: Tensor, cosine: Tensor, sine: Tensor, room: CacheRoom) -> Around:
        """Run one token `[1, 1, hidden]`, as `SelfAttention` does."""
        stream, normed = torch.empty_like(hidden), torch.empty_like(hidden)
        chosen = weights = None
        if self.routing is not None:
            chosen = torch.empty(1, self.routing.top_k, dtype=torch.int64)
            weights = torch.empty(1, self.routing.top_k)
        _kernel()(
            self.address,
            hidden.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            room.keys.data_ptr(),
            room.values.data_ptr(),
            room.keys.shape[2],
            room.filled,
            stream.data_ptr(),
            normed.data_ptr(),
            None if chosen is None else chosen.data_ptr(),
            None if weights is None else weights.data_ptr(),
            threads(),
            rounding.is_allowed(),
        )
        room.filled += 1
        if weights is not None and self.routing is not None:
            weights = weights.to(self.routing.dtype)
        return Around(stream, normed, chosen, weights)


@cache
def _kernel() -> Any:
    """The function of the library, told of its arguments once."""
    found, pointer, number, switch = library().moetool_layer, ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    found.argtypes, found.restype = [*(6 * [pointer]), number, number, *(4 * [pointer]), switch, switch], None
    return found
