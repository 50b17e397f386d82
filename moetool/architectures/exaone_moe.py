"""K-EXAONE: 128 experts, sigmoid scores with a correction bias, one shared expert, sliding windows in most layers."""

from moetool.architectures.base import Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="EXAONE-MoE",
    model_types=("exaone_moe",),
    reference="https://huggingface.co/LGAI-EXAONE/K-EXAONE-236B-A23B",
    experts_key="num_experts",
    intermediate_key="moe_intermediate_size",
    router_rule="sigmoid, top-k of the best groups by corrected scores, renormalized, times routed_scaling_factor",
    router_options={"scoring_func": ("sigmoid",)},
    router_others=("mlp.e_score_correction_bias",),
    others=("shared_experts.",),
    groups_keys=("n_group", "topk_group"),
    moe_layers_rule=MoELayers(first_dense="first_k_dense_replace", kinds="mlp_layer_types"),
    shared_expert_module="mlp.shared_experts",
)
