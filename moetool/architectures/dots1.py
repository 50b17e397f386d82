"""dots.llm1: 128 experts, sigmoid scores with a correction bias, shared experts, leading dense layers."""

from moetool.architectures.base import Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="dots.llm1",
    model_types=("dots1",),
    reference="https://arxiv.org/abs/2506.05767",
    experts_key="n_routed_experts",
    intermediate_key="moe_intermediate_size",
    router_rule="sigmoid, top-k of the best groups by corrected scores, renormalized, times routed_scaling_factor",
    router_options={"moe_layer_freq": (1,)},
    others=("shared_experts.", "gate.e_score_correction_bias"),
    groups_keys=("n_group", "topk_group"),
    moe_layers_rule=MoELayers(first_dense="first_k_dense_replace"),
    shared_expert_module="mlp.shared_experts",
)
