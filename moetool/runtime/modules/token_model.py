"""Models of which a generated token takes one call for all layers, experts and all."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from moetool.kernels.held import Held, are_current
from moetool.kernels.layers import TokenLayers
from moetool.kernels.self_attention import rotates
from moetool.runtime.cache_name import CACHE, cache_in
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.fused import gives_back
from moetool.runtime.modules.inference import KernelExperts
from moetool.runtime.modules.known import InFront, in_front_of, is_watched, says
from moetool.runtime.modules.token_attention import TokenAttention, is_token, may_decode
from moetool.runtime.modules.token_layer import DecodingLayer

# What the call computes, as transformers has it in Mixtral, Phi-MoE and Qwen3-MoE.
_MODEL = """
def forward(self, input_ids, attention_mask, cache, inputs_embeds, **kwargs):
    if (input_ids is None) ^ (inputs_embeds is not None):
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    if use_cache and cache is None:
        cache = DynamicCache(config=self.config)
    if inputs_embeds is None:
        inputs_embeds = self.embed_tokens(input_ids)
    if position_ids is None:
        past_seen_tokens = cache.get_seq_length() if cache is not None else 0
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
        position_ids = position_ids.unsqueeze(0)
    mask_function = create_causal_mask if self.config.sliding_window is None else create_sliding_window_causal_mask
    causal_mask = mask_function(
        config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, cache=cache
    )
    hidden_states = inputs_embeds
    position_embeddings = self.rotary_emb(hidden_states)
    for decoder_layer in self.layers[: self.config.num_hidden_layers]:
        hidden_states = decoder_layer(
            hidden_states, attention_mask=causal_mask, cache=cache, position_embeddings=position_embeddings, **kwargs
        )
    hidden_states = self.norm(hidden_states)
    return MoeModelOutputWithPast(last_hidden_state=hidden_states, cache=cache)
"""
_TOLD = ("output_hidden_states", "output_attentions", "output_router_logits")  # by the config, where no caller does


@dataclass(frozen=True)
class _Noted:
    """The layers of a model as they lay in memory.

    Attributes:
        kernel: all of them.
        held: tensors that every token meets.
        experts: of every layer, those that were chosen among the tensors of each.
        modules: those that the kernel stands for.
        storages: the memory of experts, which is looked at only after it was read: so it must not be freed before.
    """

    kernel: TokenLayers
    held: Held
    experts: Sequence[KernelExperts]
    modules: Sequence[nn.Module]
    storages: Sequence[torch.UntypedStorage]

    def met_current(self, met: Sequence[Sequence[int]]) -> bool:
        """Whether the tensors of the experts that were met in each layer are where they were."""
        layers = zip(self.experts, met, strict=True)
        return are_current([own.each[expert] for own, chosen in layers if own.each for expert in chosen])


class DecodingModel(InFront):
    """In front of a family's model: one token without a mask by one call of a kernel for all layers, all else as the
    family does."""

    config: Any
    layers: Any
    embed_tokens: Any
    rotary_emb: Any
    norm: Any
    made: _Noted | None
    is_refused = False  # its layers were looked at, and something in them is nothing for kernels

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Run the family's forward, or all its layers in one call where that gives the same output."""
        if input_ids is not None and not arguments and self._is_plain(input_ids, options):
            found = self._decoded(input_ids, attention_mask, position_ids, cache_in(options))
            if found is not None:
                kind: Any = sys.modules[type(self).__module__].MoeModelOutputWithPast
                return kind(last_hidden_state=self.norm(found), **{CACHE: cache_in(options)})
        return super().forward(input_ids, attention_mask, position_ids, *arguments, **options)

    def _is_plain(self, input_ids: Tensor, options: Mapping[str, Any]) -> bool:
        """Whether one token of one row is to go through, and nothing but the output is asked for."""
        names = (CACHE, "past_key_values", "use_cache", "return_dict")
        return (
            may_decode(self.config, cache_in(options))
            and input_ids.shape == (1, 1)
            and not self.training
            and not self.is_refused
            and options.get("use_cache") is not False
            and options.get("return_dict") is not False
            and all(value is None or value is False for name, value in options.items() if name not in names)
            and self.config.sliding_window is None
            and self.config.num_hidden_layers == len(self.layers)
            and getattr(self.config, "return_dict", True)
            and not any(getattr(self.config, name, False) for name in _TOLD)
        )

    def _decoded(
        self, input_ids: Tensor, mask: Tensor | None, positions: Tensor | None, past: DynamicCache
    ) -> Tensor | None:
        """What the last layer gives, `[1, 1, hidden]`; None if it is not for the kernel, with the cache as it was."""
        if (noted := self._noted()) is None or is_watched(*noted.modules):
            return None
        if not self.layers[0].mlp.experts.may_run_on_kernels():
            return None
        found = [layer.self_attn.place(past) for layer in self.layers]
        places = [place for place in found if place is not None]
        if not places or len(places) < len(found):
            return None
        if mask is not None and not _hides_nothing(mask, places[0].room.filled + 1):
            return None
        if positions is None:
            positions = torch.tensor([[past.get_seq_length()]])
        hidden: Tensor = self.embed_tokens(input_ids)
        if not is_token(hidden):
            return None
        cosine, sine = self.rotary_emb(hidden, position_ids=positions)
        if not all(rotates(own, self.layers[0].self_attn.head_dim) for own in (cosine, sine)):
            return None
        output, met = noted.kernel(hidden, cosine, sine, [place.room for place in places])
        if not noted.met_current(met):
            self.made = None
            return None
        for place in places:
            place.room.filled += 1
            place.keep()
        return output

    def _noted(self) -> _Noted | None:
        """All layers as kernels see them now; None if they cannot run them."""
        if self.made is None or not self.made.held.is_current():
            self.made = self._noted_now()
            self.is_refused = self.made is None
        return self.made

    def _noted_now(self) -> _Noted | None:
        held, kernels, experts = [Held([self.layers])], [], []
        modules: list[nn.Module] = []
        for number, layer in enumerate(self.layers):
            if not isinstance(layer, DecodingLayer) or not isinstance(layer.self_attn, TokenAttention):
                return None
            if layer.self_attn.layer_idx != number:  # two that have one place in the cache
                return None
            attention = layer.self_attn.kernel()
            own = None if attention is None else layer.kernel(attention)
            if own is None or own.routing is None or not _is_run(layer.mlp.experts):
                return None
            found = layer.mlp.experts.kernel_form()
            block = None if found is None else found.for_one_token()
            if found is None or block is None:
                return None
            for front in (layer.self_attn, layer):
                held += [] if front.made is None else [front.made[1]]
            held += found.common
            kernels.append((own, block))
            experts.append(found)
            modules += [layer, *layer.parts(), *layer.self_attn.children(), layer.mlp.experts]
        storages = [storage for own in experts for each in own.each for storage in each.storages()]
        return _Noted(TokenLayers(kernels), Held.together(held), experts, modules, storages)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        self.made, self.is_refused = None, False  # or memory would be kept that is not needed any more
        return super()._apply(*arguments, **options)


def _hides_nothing(mask: Any, length: int) -> bool:
    return isinstance(mask, Tensor) and mask.shape == (1, length) and bool(mask.all())


def _is_run(experts: Any) -> bool:
    """Whether experts compute nothing but what their kernels do."""
    own: Any = type(experts)
    return (
        isinstance(experts, SharedBaseExperts)
        and own.forward is SharedBaseExperts.forward
        and not gives_back(experts.native)
    )


def decode_in_one_call(model: nn.Module) -> None:
    """Have single tokens run through all layers of a model, in place, in one call, where the family's code is known and
    all its layers decode in few (`decode_in_few_calls`)."""
    for module in model.modules():
        own: Any = type(module)
        layers: Any = getattr(module, "layers", ())
        if _is_model(own) and len(layers) and all(isinstance(layer, DecodingLayer) for layer in layers):
            module.__class__ = in_front_of(own, DecodingModel)


@cache
def _is_model(own: Any) -> bool:
    return not issubclass(own, DecodingModel) and says(own.forward, _MODEL)
