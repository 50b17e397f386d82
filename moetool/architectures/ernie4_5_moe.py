"""ERNIE 4.5 (text): softmax scores with a correction bias, shared experts, leading dense layers."""

from moetool.architectures.base import Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="ERNIE-4.5-MoE",
    model_types=("ernie4_5_moe",),
    reference="https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-PT",
    experts_key="moe_num_experts",
    intermediate_key="moe_intermediate_size",
    router_rule="softmax over all experts, top-k by corrected scores, renormalized",
    top_k_key="moe_k",
    router_others=("mlp.moe_statics.e_score_correction_bias",),
    others=("shared_experts.",),
    moe_layers_rule=MoELayers(
        first_dense="moe_layer_start_index", every=("moe_layer_interval", -1), last="moe_layer_end_index"
    ),
    shared_expert_module="mlp.shared_experts",
)
