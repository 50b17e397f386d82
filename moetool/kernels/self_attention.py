"""Self-attention of one token, from its projections to its output, in one call of the compiled C++ of this package."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moetool.compiled.compiler import library, threads
from moetool.kernels import rounding
from moetool.kernels.operands import FIELDS, operand_row
from moetool.representations.operand import Operand

_MORE = 256  # tokens that a cache has room for when it grows, or half of those it holds


class Projection(ctypes.Structure):
    """As vector.h has it."""

    _fields_ = (("matrix", FIELDS * ctypes.c_int64), ("bias", ctypes.c_void_p))


class SelfAttentionStruct(ctypes.Structure):
    """As projected.cpp has it."""

    _fields_ = (
        *((name, Projection) for name in ("query", "key", "value", "out")),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("heads", "keys", "width")),
        *((name, ctypes.c_float) for name in ("query_epsilon", "key_epsilon", "scale")),
    )


class CacheRoom:
    """Memory of one sequence's keys and values in which tokens follow, without copies of those before.

    Attributes:
        keys, values: [1, heads of keys, tokens there is room for, width] bf16.
        filled: tokens that have been written, by whoever shares this.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """A copy of `[1, heads of keys, length, width]` each, with room for more."""
        length = keys.shape[2]
        self.keys, self.values = (_with_room(states, max(_MORE, length // 2)) for states in (keys, values))
        self.filled = length

    def continues(self, keys: Tensor, values: Tensor) -> bool:
        """Whether these are what lies here, all of it, so that there is only to write behind it."""
        return (
            keys.shape[2] == self.filled < self.keys.shape[2]
            and keys.data_ptr() == self.keys.data_ptr()
            and values.data_ptr() == self.values.data_ptr()
        )

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, as views."""
        return self.keys.narrow(2, 0, self.filled), self.values.narrow(2, 0, self.filled)


def _with_room(states: Tensor, more: int) -> Tensor:
    batch, heads, length, width = states.shape
    made = states.new_empty(batch, heads, length + more, width)
    made[:, :, :length] = states
    return made


@dataclass(frozen=True)
class Projected:
    """A linear layer.

    Attributes:
        matrix: [out, in] of numbers in bf16, or of codes of 5, 6 or 8 bits, of which bytes serve whole rows, with
            scales in bf16 for groups of a multiple of 16.
        bias: [out] in bf16.
    """

    matrix: Operand
    bias: Tensor | None

    def structure(self) -> Projection:
        """The struct of vector.h. Valid as long as the tensors are where they are."""
        row = (FIELDS * ctypes.c_int64)(*operand_row(self.matrix))
        return Projection(row, None if self.bias is None else self.bias.data_ptr())


@dataclass(frozen=True)
class RootMeanSquare:
    """A norm of numbers by the root of their mean square, its weight `[width]` in bf16."""

    weight: Tensor
    epsilon: float


class SelfAttention:
    """Self-attention of a layer. Valid as long as its tensors are where they are."""

    def __init__(
        self,
        projections: tuple[Projected, Projected, Projected, Projected],
        norms: tuple[RootMeanSquare, RootMeanSquare] | None,
        width: int,
        scale: float,
    ) -> None:
        """Note where everything lies.

        Args:
            projections: to queries, keys, values and output.
            norms: of queries and of keys, before they are rotated.
            width: numbers in a head.
            scale: of products of queries and keys.
        """
        query, key, _, self._out = projections
        self._own = SelfAttentionStruct(
            *(own.structure() for own in projections),
            *([None, None] if norms is None else [norm.weight.data_ptr() for norm in norms]),
            query.matrix.outputs // width,
            key.matrix.outputs // width,
            width,
            *([0.0, 0.0] if norms is None else [norm.epsilon for norm in norms]),
            scale,
        )
        self._address = ctypes.addressof(self._own)

    @property
    def structure(self) -> ctypes.Structure:
        """The struct `SelfAttention` of projected.cpp."""
        return self._own

    def __call__(self, hidden: Tensor, cosine: Tensor, sine: Tensor, room: CacheRoom) -> Tensor:
        """`[1, 1, hidden]` → `[1, 1, out]`, where the token's rotation is `[1, 1, width]` each; all in bf16 and
        contiguous. Its key and its value are written into the `room`, which has some."""
        output = hidden.new_empty(1, 1, self._out.matrix.outputs)
        _kernel()(
            self._address,
            hidden.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            room.keys.data_ptr(),
            room.values.data_ptr(),
            room.keys.shape[2],
            room.filled,
            output.data_ptr(),
            threads(),
            rounding.is_allowed(),
        )
        room.filled += 1
        return output


def rotates(token: Tensor, width: int) -> bool:
    """Whether cosines or sines are those of one token, for all numbers of a head in pairs of its halves."""
    return token.shape == (1, 1, width) and token.dtype == torch.bfloat16 and token.is_contiguous()


@cache
def _kernel() -> Any:
    """The function of the library, told of its arguments once."""
    found, pointer, number, switch = library().moetool_self_attention, ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    found.argtypes, found.restype = [*(6 * [pointer]), number, number, pointer, switch, switch], None
    return found
