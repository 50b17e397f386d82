"""DBRX's experts in the form that transformers has given to all other families. Files are read and written as before:
there the matrices of all experts of a layer lie below each other, those of down turned round."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter
from transformers.models.dbrx.modeling_dbrx import DbrxFFN, DbrxRotaryEmbedding, DbrxRouter

from moetool.architectures import MoEShape
from moetool.runtime.conversions import only
from moetool.runtime.families import fused_experts, take_the_place


class DbrxOwnRotaryEmbedding(DbrxRotaryEmbedding):
    """With the base that `config.json` says, in the entries of attention, where transformers 5.24.0 does not look."""

    def __init__(self, config: Any) -> None:
        told = copy.copy(config)
        if base := getattr(config.attn_config, "rope_theta", None):
            told.rope_parameters = {**config.rope_parameters, "rope_theta": base}
        super().__init__(told)


class DbrxTopKRouter(DbrxRouter):
    """DBRX's router, which also says which experts are chosen and with which weights: in transformers the block around
    it does that."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.top_k, self.order = config.moe_top_k, config.moe_normalize_expert_weights

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits `[tokens, experts]`, weights and experts `[tokens, k]`."""
        logits = super().forward(hidden_states)
        weights, chosen = logits.softmax(1, dtype=logits.dtype).topk(self.top_k, dim=-1)
        if self.order is not None:
            weights = weights / torch.norm(weights, p=self.order, dim=-1, keepdim=True)
        return logits, weights, chosen


class DbrxFusedFFN(DbrxFFN):
    """DBRX's block of router and experts, with the matrices of all experts in fused tensors."""

    experts: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own, activation = config.ffn_config, self.experts.mlp.activation_fn
        shape = MoEShape(own.moe_num_experts, own.moe_top_k, own.hidden_size, own.ffn_hidden_size)
        self.router = DbrxTopKRouter(own)
        self.experts = fused_experts(shape, activation, config.initializer_range)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[batch, length, hidden]` → `[batch, length, hidden]`."""
        _, weights, chosen = self.router(hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        output: Tensor = self.experts(rows, chosen, weights)
        return output.view_as(hidden_states)


class TakenApart(ConversionOps):
    """Matrices that lie below each other `[experts · rows, columns]` → `[experts, rows, columns]`, or turned round."""

    def __init__(self, *, turned: bool) -> None:
        self.turned = turned

    def _each(self, tensor: Tensor, **options: Any) -> Tensor:
        held = options["model"].get_parameter_or_buffer(options["full_layer_name"])
        apart = tensor.unflatten(0, (len(held), -1))
        return apart.transpose(1, 2).contiguous() if self.turned else apart

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **options: Any
    ) -> dict[str, Any]:
        """Convert every tensor. Of one source and one target the result has the target's name."""
        alone = len(source_patterns) == len(target_patterns) == 1
        return {
            target_patterns[0] if alone else name: self._each(only(found), **options)
            for name, found in input_dict.items()
        }

    @property
    def reverse_op(self) -> "TakenApart":
        """The conversion by which a model is saved: it puts matrices `[experts, rows, columns]` below each other."""
        return PutBelow(turned=self.turned)


class PutBelow(TakenApart):
    """Matrices `[experts, rows, columns]`, or turned round, → below each other `[experts · rows, columns]`."""

    def _each(self, tensor: Tensor, **options: Any) -> Tensor:
        return (tensor.transpose(1, 2) if self.turned else tensor).flatten(0, 1).contiguous()

    @property
    def reverse_op(self) -> TakenApart:
        """The conversion by which files are loaded: it takes the matrices below each other apart."""
        return TakenApart(turned=self.turned)


take_the_place(DbrxFFN, DbrxFusedFFN)
take_the_place(DbrxRotaryEmbedding, DbrxOwnRotaryEmbedding)
register_checkpoint_conversion_mapping(
    "dbrx",
    [
        WeightConverter(
            ["experts.mlp.w1", "experts.mlp.v1"],
            "experts.gate_up_proj",
            [TakenApart(turned=False), Concatenate(1)],
        ),
        WeightConverter("experts.mlp.w2", "experts.down_proj", [TakenApart(turned=True)]),
    ],
    overwrite=True,
)
