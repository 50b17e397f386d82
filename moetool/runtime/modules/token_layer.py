"""Layers of compressed models, in which all that a generated token takes beside its experts is one call."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from moetool.kernels.held import Held
from moetool.kernels.layer import Around, TokenLayer, TopKRouting
from moetool.kernels.self_attention import RootMeanSquare
from moetool.kernels.vector import LANES
from moetool.runtime.cache_name import cache_in
from moetool.runtime.modules.known import InFront, in_front_of, is_watched, says
from moetool.runtime.modules.token_attention import TokenAttention, is_norm

# What kernels compute, as transformers has it in some sixty families.
_LAYER = """
def forward(self, hidden_states, position_embeddings, attention_mask, cache, **kwargs):
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask,
        cache=cache, **kwargs
    )
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states
"""
_BLOCKS = (
    """
def forward(self, hidden_states):
    batch_size, sequence_length, hidden_dim = hidden_states.shape
    if self.training and self.jitter_noise > 0:
        hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
    hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
    _, top_k_weights, top_k_index = self.gate(hidden_states)
    hidden_states = self.experts(hidden_states, top_k_index, top_k_weights)
    hidden_states = hidden_states.reshape(batch_size, sequence_length, hidden_dim)
    return hidden_states
""",
    """
def forward(self, hidden_states):
    batch_size, sequence_length, hidden_dim = hidden_states.shape
    hidden_states_reshaped = hidden_states.view(-1, hidden_dim)
    _, routing_weights, selected_experts = self.gate(hidden_states_reshaped)
    final_hidden_states = self.experts(hidden_states_reshaped, selected_experts, routing_weights)
    return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)
""",
)
_ROUTER = """
def forward(self, hidden_states):
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states, self.weight)
    router_probs = torch.nn.functional.softmax(router_logits.float(), dim=-1)
    router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
    router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
    router_scores = router_top_value
    return router_logits, router_scores, router_indices
"""
_ROUNDING_ROUTER = """
def forward(self, hidden_states):
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states, self.weight)
    router_probs = torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)
    router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
    if self.norm_topk_prob:
        router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
    router_top_value = router_top_value.to(router_logits.dtype)
    router_scores = router_top_value
    return router_logits, router_scores, router_indices
"""


class DecodingLayer(InFront):
    """In front of a family's layer: one token without a mask by a kernel, but for the experts, all else as the family
    does."""

    self_attn: TokenAttention
    mlp: Any
    made: tuple[TokenLayer | None, Held, Any] | None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """`[batch, tokens, hidden]` → `[batch, tokens, hidden]`."""
        around = self._around(hidden_states, position_embeddings, attention_mask, cache_in(options))
        if around is None:
            found: Tensor = super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **options,
            )
            return found
        if around.chosen is None:
            return around.stream + self.mlp(around.normed)
        experts: Tensor = self.mlp.experts(around.normed.view(1, -1), around.chosen, around.weights)
        return around.stream + experts.view(around.stream.shape)

    def _around(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None, past: Any
    ) -> Around | None:
        """What one token gets beside its experts; None if that is not for the kernel."""
        if self.training or not isinstance(self.self_attn, TokenAttention) or is_watched(*self.parts()):
            return None
        ready = self.self_attn.ready(hidden, rotation, mask, past)
        if ready is None or rotation is None or (kernel := self.kernel(ready.kernel)) is None:
            return None
        around = kernel(hidden.contiguous(), *rotation, ready.place.room)
        ready.place.keep()
        return around

    def parts(self) -> list[Any]:
        """The modules that a kernel stands for, experts left out."""
        parts = [self.self_attn, self.input_layernorm, self.post_attention_layernorm]
        return [*parts, self.mlp, self.mlp.gate] if hasattr(self.mlp, "gate") else parts

    def kernel(self, attention: Any) -> TokenLayer | None:
        """The kernel's form of it, made anew when tensors were replaced."""
        if self.made is None or self.made[2] is not attention or not self.made[1].is_current():
            self.made = self._noted(attention), Held([self, *self.parts()[1:]]), attention
        return self.made[0]

    def _noted(self, attention: Any) -> TokenLayer | None:
        norms: list[Any] = [self.input_layernorm, self.post_attention_layernorm]
        hidden = self.self_attn.k_proj.in_features
        kinds: list[Any] = [type(norm) for norm in norms]
        fits = (
            all(map(is_norm, kinds))
            and all(_is_read(norm.weight, (hidden,)) for norm in norms)
            and self.self_attn.o_proj.out_features == hidden
            and hidden % LANES == 0
        )
        before, after = (RootMeanSquare(norm.weight, norm.variance_epsilon) for norm in norms) if fits else (None, None)
        return None if before is None or after is None else TokenLayer(attention, before, after, self._routing(hidden))

    def _routing(self, hidden: int) -> TopKRouting | None:
        """The router, if kernels know it; else `mlp` runs as it is."""
        gate = getattr(self.mlp, "gate", None)
        block: Any = type(self.mlp)
        router: Any = type(gate)
        code = _router(router) if _is_block(block) else None
        if gate is None or code is None or not _is_read(gate.weight, (len(gate.weight), hidden)):
            return None
        if not 0 < gate.top_k <= len(gate.weight):
            return None
        if code == _ROUTER:
            return TopKRouting(gate.weight, gate.top_k, True, torch.float32)
        return TopKRouting(gate.weight, gate.top_k, bool(gate.norm_topk_prob), torch.bfloat16)


def _is_read(weight: Any, shape: tuple[int, ...]) -> bool:
    """Whether a weight of that shape lies as kernels read it."""
    is_plain = type(weight) is nn.Parameter and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return is_plain and weight.shape == shape and weight.is_contiguous()


def decode_in_few_calls(model: nn.Module) -> None:
    """Have the layers of a model, in place, run single tokens in one call and that of their experts, where the family's
    layers and their attention are known (`attend_in_one_call`)."""
    for module in model.modules():
        own: Any = type(module)
        if isinstance(getattr(module, "self_attn", None), TokenAttention) and _is_layer(own):
            module.__class__ = in_front_of(own, DecodingLayer)


@cache
def _is_layer(own: Any) -> bool:
    return not issubclass(own, DecodingLayer) and says(own.forward, _LAYER)


@cache
def _is_block(own: Any) -> bool:
    return any(says(own.forward, block) for block in _BLOCKS)


@cache
def _router(own: Any) -> str | None:
    """The code of a router that kernels know; None of any other."""
    forward = getattr(own, "forward", None)
    return next((code for code in (_ROUTER, _ROUNDING_ROUTER) if says(forward, code)), None)
