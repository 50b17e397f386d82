"""The Granite-MoE family, for models with multipliers (Granite, Gemma) or with biases on all attention projections."""

from moetool.format.kinds.moe import MoESpec
from moetool.runtime.dense import DenseModel
from moetool.upcycle.targets.base import Target, common

EXPRESSES = frozenset({"attention_bias", "qkv_bias", "scaled_embedding", "multipliers", "head_dim"})


def entries(dense: DenseModel, spec: MoESpec) -> dict[str, object]:
    config = dense.config
    scaled = dense.hidden**0.5 if "scaled_embedding" in dense.features else 1.0
    return {
        **common(dense),
        "intermediate_size": spec.intermediate,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "attention_bias": "attention_bias" in dense.features or "qkv_bias" in dense.features,
        "embedding_multiplier": getattr(config, "embedding_multiplier", scaled),
        "attention_multiplier": getattr(config, "attention_multiplier", dense.head_dim**-0.5),
        "residual_multiplier": getattr(config, "residual_multiplier", 1.0),
        "logits_scaling": getattr(config, "logits_scaling", 1.0),
        "router_aux_loss_coef": 0.01,
    }


TARGET = Target(
    name="granitemoe",
    model_class="GraniteMoeForCausalLM",
    entries=entries,
    expresses=EXPRESSES,
    last_resort_for=frozenset({"qkv_bias"}),
    completed_biases=("o_proj",),
)
