"""Self-attention of compressed models, in which a generated token takes one call instead of thirty operations."""

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from moetool.compiled.compiler import problem
from moetool.kernels.held import Held
from moetool.kernels.self_attention import CacheRoom, Projected, RootMeanSquare, SelfAttention, rotates
from moetool.kernels.vector import LANES
from moetool.numerics.packing import rows_served
from moetool.numerics.quantization import is_whole
from moetool.representations.operand import numbers
from moetool.runtime.attention import MOETOOL_ATTENTION
from moetool.runtime.cache_name import cache_in
from moetool.runtime.modules.known import InFront, in_front_of, is_watched, says
from moetool.runtime.modules.linear import TokenLinear
from moetool.runtime.modules.offloading import is_fetched
from moetool.runtime.modules.quantized import QuantizedLinear

# What the kernel computes, as transformers has it in some forty families. A family that says anything else keeps its
# own.
_FORWARD = """
def forward(self, hidden_states, position_embeddings, attention_mask, cache, **kwargs):
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, self.head_dim)
    query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    cos, sin = position_embeddings
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
    if cache is not None:
        key_states, value_states = cache.update(key_states, value_states, self.layer_idx)
    attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, eager_attention_forward
    )
    attn_output, attn_weights = attention_interface(
        self, query_states, key_states, value_states, attention_mask,
        dropout=0.0 if not self.training else self.attention_dropout, scaling=self.scaling, **kwargs
    )
    attn_output = attn_output.reshape(*input_shape, -1).contiguous()
    attn_output = self.o_proj(attn_output)
    return attn_output, attn_weights
"""
_NORMED = _FORWARD
for _name in ("q", "k"):
    _NORMED = _NORMED.replace(
        f"self.{_name}_proj(hidden_states).view(hidden_shape)",
        f"self.{_name}_norm(self.{_name}_proj(hidden_states).view(hidden_shape))",
    )
_NORM = """
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
"""
_ROTATION = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
_HALVES = """
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
"""


class TokenAttention(InFront):
    """In front of a family's class of attention: one token without a mask by a kernel, all else as the family does."""

    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    k_proj: nn.Linear
    o_proj: nn.Linear
    made: tuple[SelfAttention | None, Held] | None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`[batch, tokens, hidden]` → `[batch, tokens, hidden]`, and None."""
        ready = self.ready(hidden_states, position_embeddings, attention_mask, cache_in(options))
        if ready is not None and position_embeddings is not None:
            output = ready.kernel(hidden_states.contiguous(), *position_embeddings, ready.place.room)
            ready.place.keep()
            return output, None
        found: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **options,
        )
        return found

    def ready(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None, cache: Any
    ) -> "Ready | None":
        """What one token needs to attend by a kernel; None if it is not for that."""
        if (
            mask is not None
            or rotation is None
            or self.training
            or not is_token(hidden)
            or not may_decode(self.config, cache)
            or not all(rotates(own, self.head_dim) for own in rotation)
            or (kernel := self.kernel()) is None
            or hidden.shape[2] != self.k_proj.in_features
            or (place := self.place(cache)) is None
        ):
            return None
        return Ready(kernel, place)

    def place(self, cache: DynamicCache) -> "CachePlace | None":
        """Where the next token is to be written in the layer of a cache that is this one's; None if that is of another
        kind."""
        if self.layer_idx >= len(cache.layers):
            return None
        layer = cache.layers[self.layer_idx]
        if type(layer) is not DynamicLayer or not layer.is_initialized:
            return None
        room = _room(layer, self.k_proj.out_features // self.head_dim, self.head_dim)
        return None if room is None else CachePlace(layer, room)

    def kernel(self) -> SelfAttention | None:
        """The kernel's form of it, made anew when tensors were replaced; None where modules are not what they were, or
        others want to see what goes through them."""
        parts: list[Any] = [getattr(self, name) for name in _PARTS if hasattr(self, name)]
        if is_watched(*parts):
            return None
        if self.made is None or not self.made[1].is_current():
            stored = [part.stored for part in parts if isinstance(part, QuantizedLinear)]
            self.made = self._noted(parts), Held([self, *parts, *stored])
        return self.made[0]

    def _noted(self, parts: list[Any]) -> SelfAttention | None:
        projections = [found for part in parts if (found := _projected(part)) is not None]
        kinds: list[Any] = [type(part) for part in parts]
        norms = [part for part, kind in zip(parts, kinds, strict=True) if is_norm(kind)]
        plain = [part for part in parts if not isinstance(part, QuantizedLinear)]
        tensors = [tensor for part in plain for tensor in part._parameters.values() if tensor is not None]
        fits = (
            len(projections) == 4
            and len(norms) == (2 if hasattr(self, "q_norm") else 0)
            and all(type(own) is nn.Parameter and own.dtype == torch.bfloat16 for own in tensors)
            and all(own.device.type == "cpu" and own.is_contiguous() for own in tensors)
            and all(norm.weight.shape == (self.head_dim,) for norm in norms)
            and self.head_dim % (2 * LANES) == 0  # of two halves that are rotated
            and not problem()
        )
        if not fits:
            return None
        query, key, value, out = projections
        rows, count = query.matrix.outputs, key.matrix.outputs
        if rows % self.head_dim or count % self.head_dim or rows % count or out.matrix.inputs != rows:
            return None
        if not query.matrix.inputs == key.matrix.inputs == value.matrix.inputs or value.matrix.outputs != count:
            return None
        both = [RootMeanSquare(norm.weight, norm.variance_epsilon) for norm in norms]
        return SelfAttention(
            (query, key, value, out), (both[0], both[1]) if both else None, self.head_dim, self.scaling
        )


@dataclass(frozen=True)
class CachePlace:
    """Where a token's key and its value are to be written in a cache's layer."""

    layer: DynamicLayer
    room: CacheRoom

    def keep(self) -> None:
        """Have the cache hold what has been written."""
        self.layer.keys, self.layer.values = self.room.held()


@dataclass(frozen=True)
class Ready:
    """A token's attention: the kernel, and its place in the cache."""

    kernel: SelfAttention
    place: CachePlace


def is_token(hidden: Tensor) -> bool:
    """Whether these are numbers of one token, as kernels read them."""
    return (
        hidden.shape[:2] == (1, 1)
        and hidden.dtype == torch.bfloat16
        and hidden.device.type == "cpu"
        and type(hidden) is Tensor
    )


def may_decode(config: Any, cache: Any) -> bool:
    """Whether a token may go through kernels: with a cache that grows, without gradients, and with moetool's
    attention."""
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and config._attn_implementation == MOETOOL_ATTENTION
    )


_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


def _projected(part: Any) -> Projected | None:
    """A part of attention as a linear layer that the kernel knows; None if it is none."""
    if type(part) is TokenLinear:
        return Projected(numbers(part.weight), part.bias)
    if type(part) is not QuantizedLinear:
        return None
    matrix, scales, bias = part.stored.operand(), part.stored.scales, part.bias
    fits = (
        matrix.kind == "codes"
        and is_whole(matrix.bits)
        and matrix.outputs % rows_served(matrix.bits) == 0
        and matrix.data.device.type == scales.device.type == "cpu"
        and scales.dtype == torch.bfloat16
        and matrix.data.is_contiguous()
        and scales.is_contiguous()
        and (bias is None or (bias.dtype == torch.bfloat16 and bias.device.type == "cpu" and bias.is_contiguous()))
        and not is_fetched(part.stored)
        and matrix.inputs % matrix.group == 0
        and matrix.group % LANES == 0
    )
    return Projected(matrix, bias) if fits else None


def _room(layer: DynamicLayer, heads: int, width: int) -> CacheRoom | None:
    """Where the next token of a cache's layer is to be written. It is the layer's alone: whoever crops it, or goes on
    with a copy from an earlier token, gets memory of his own."""
    keys, values = layer.keys, layer.values
    room: CacheRoom | None = layer.__dict__.get("moetool_room")
    if room is not None and room.continues(keys, values):
        return room
    for states in (keys, values):
        if states.dtype != torch.bfloat16 or states.device.type != "cpu" or states.shape[:2] != (1, heads):
            return None
        if states.shape[3] != width or keys.shape[2] != values.shape[2]:
            return None
    room = layer.moetool_room = CacheRoom(keys, values)
    return room


def attend_in_one_call(model: nn.Module) -> None:
    """Have the attention of a model, in place, run single tokens in one call, where the family's is known."""
    for module in model.modules():
        own: Any = type(module)
        if _is_known(own):
            module.__class__ = in_front_of(own, TokenAttention)


@cache
def _is_known(own: Any) -> bool:
    """Whether a class computes what the kernel does, by its source."""
    if not own.__name__.endswith("Attention") or issubclass(own, TokenAttention):
        return False
    family = sys.modules[own.__module__]
    return (
        (says(own.forward, _FORWARD) or says(own.forward, _NORMED))
        and says(getattr(family, "apply_rotary_pos_emb", None), _ROTATION)
        and says(getattr(family, "rotate_half", None), _HALVES)
    )


@cache
def is_norm(own: Any) -> bool:
    """Whether a class is the norm by the root mean square that the kernels know."""
    return says(own.forward, _NORM)
