"""All layers of a model, for one token, in one call of the compiled C++ of this package."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moetool.compiled.compiler import library, threads
from moetool.kernels import rounding
from moetool.kernels.block import Block
from moetool.kernels.layer import TokenLayer
from moetool.kernels.self_attention import CacheRoom


class _Step(ctypes.Structure):
    """The struct `Step` of layers.cpp: a layer, its experts, and its part of the cache."""

    _fields_ = (
        ("layer", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("chosen", ctypes.c_int64),
        ("rounds", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("room", ctypes.c_int64),
        ("length", ctypes.c_int64),
    )


class TokenLayers:
    """Layers one after the other, each with a router and its experts. Valid as long as their tensors are where they
    are."""

    def __init__(self, layers: Sequence[tuple[TokenLayer, Block]]) -> None:
        """Note what they point to.

        Raises:
            ValueError: a layer has no router.
        """
        self._layers, steps = layers, []
        for layer, experts in layers:
            if layer.routing is None:
                raise ValueError("A layer without a router cannot be followed by its experts.")
            rounds = layer.routing.dtype == torch.bfloat16
            steps.append(_Step(layer.address, experts.address, layer.routing.top_k, rounds))
        self._steps = (_Step * len(steps))(*steps)
        self._met = [step.chosen for step in steps]

    def __call__(
        self, hidden: Tensor, cosine: Tensor, sine: Tensor, rooms: Sequence[CacheRoom]
    ) -> tuple[Tensor, list[list[int]]]:
        """Run one token, as `SelfAttention` does.

        Args:
            hidden: [1, 1, hidden] bf16, as the first layer is given it.
            cosine: of the token's rotation, [1, 1, width of a head] bf16, and
            sine: the same.
            rooms: of every layer. Keys and values are written behind what they hold, and count as soon as `filled` says
                so.

        Returns:
            What the last layer gives, [1, 1, hidden], and the experts that the token met in each.
        """
        steps = type(self._steps).from_buffer_copy(self._steps)  # other threads have their own caches
        for step, room in zip(steps, rooms, strict=True):
            step.keys, step.values = room.keys.data_ptr(), room.values.data_ptr()
            step.room, step.length = room.keys.shape[2], room.filled
        output = hidden.clone(memory_format=torch.contiguous_format)
        chosen = torch.empty(sum(self._met), dtype=torch.int64)
        _kernel()(
            steps,
            len(steps),
            output.data_ptr(),
            output.shape[-1],
            cosine.data_ptr(),
            sine.data_ptr(),
            chosen.data_ptr(),
            threads(),
            rounding.is_allowed(),
        )
        return output, [own.tolist() for own in chosen.split(self._met)]


@cache
def _kernel() -> Any:
    """The function of the library, told of its arguments once."""
    found, pointer, number, switch = library().moetool_layers, ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    found.argtypes = [pointer, number, pointer, number, *(3 * [pointer]), switch, switch]
    found.restype = None
    return found
