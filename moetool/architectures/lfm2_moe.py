"""LFM2-MoE: 32 experts, top-4, sigmoid scores with a correction bias; short convolutions in most layers."""

from moetool.architectures.base import NUMBERED, Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="LFM2-MoE",
    model_types=("lfm2_moe",),
    reference="https://huggingface.co/LiquidAI/LFM2-8B-A1B",
    block="feed_forward",
    weights=NUMBERED,
    experts_module="feed_forward.experts",
    experts_key="num_experts",
    intermediate_key="moe_intermediate_size",
    router_rule="sigmoid, top-k by corrected scores, renormalized if norm_topk_prob, times routed_scaling_factor",
    router_others=("feed_forward.expert_bias",),
    moe_layers_rule=MoELayers(first_dense="num_dense_layers"),
    attention=(
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
        "conv.in_proj",
        "conv.out_proj",
    ),
)
