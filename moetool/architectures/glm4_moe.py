"""GLM-4.5 and 4.6: sigmoid scores with a correction bias, one shared expert, leading dense layers."""

from moetool.architectures.base import Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="GLM-4-MoE",
    model_types=("glm4_moe",),
    reference="https://arxiv.org/abs/2508.06471",
    experts_key="n_routed_experts",
    intermediate_key="moe_intermediate_size",
    router_rule="sigmoid, top-k of the best groups by corrected scores, renormalized, times routed_scaling_factor",
    others=("shared_experts.", "gate.e_score_correction_bias"),
    groups_keys=("n_group", "topk_group"),
    moe_layers_rule=MoELayers(first_dense="first_k_dense_replace"),
    shared_expert_module="mlp.shared_experts",
)
