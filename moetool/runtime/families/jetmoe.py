"""JetMoE's layers of experts (arXiv:2404.07413), in the form that transformers has given to all other families.

Files are read and written as before. Experts of attention stay as they are.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE, JetMoeTopKGating

from moetool.architectures import MoEShape
from moetool.runtime.families import fused_experts, take_the_place


class JetMoeTopKRouter(JetMoeTopKGating):
    """JetMoE's router, which gives logits, weights and experts of each token in the order of other families."""

    layer: nn.Linear

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Logits, weights and experts of each token; and the logits again, where transformers records them."""
        logits = self.layer(hidden_states).float()
        chosen_logits, chosen = logits.topk(self.top_k, dim=1)
        weights = torch.softmax(chosen_logits, dim=1).type_as(hidden_states)
        return logits, weights, chosen, logits, logits


class JetMoeFusedMoE(JetMoeMoE):
    """JetMoE's block of router and experts, with the matrices of all experts in a module of the usual form."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.input_linear, self.output_linear
        shape = MoEShape(
            config.num_local_experts, config.num_experts_per_tok, config.hidden_size, config.intermediate_size
        )
        self.experts = fused_experts(shape, self.activation, config.initializer_range)
        self.router = JetMoeTopKRouter(shape.hidden, shape.experts, shape.top_k)

    def forward(self, layer_input: Tensor) -> Tensor:
        """`[batch, length, hidden]` → `[batch, length, hidden]`."""
        rows = layer_input.reshape(-1, layer_input.shape[-1])
        _, weights, chosen, *_ = self.router(rows)
        return self.experts(rows, chosen, weights).view_as(layer_input) + self.bias


take_the_place(JetMoeMoE, JetMoeFusedMoE)
register_checkpoint_conversion_mapping(
    "jetmoe",
    [
        WeightRenaming(rf"mlp\.{name}\.weight", f"mlp.experts.{fused}")
        for name, fused in (("input_linear", "gate_up_proj"), ("output_linear", "down_proj"))
    ],
    overwrite=True,
)
