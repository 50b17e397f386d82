"""DeepSeek-V3 and R1: 256 experts, sigmoid scores with a correction bias, groups."""

from moetool.architectures.base import LATENT_ATTENTION, Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="DeepSeek-V3",
    model_types=("deepseek_v3",),
    reference="https://arxiv.org/abs/2412.19437",
    experts_key="n_routed_experts",
    intermediate_key="moe_intermediate_size",
    router_rule="sigmoid, top-k of the best groups by corrected scores, renormalized, times routed_scaling_factor",
    router_options={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    others=("shared_experts.", "gate.e_score_correction_bias"),
    groups_keys=("n_group", "topk_group"),
    moe_layers_rule=MoELayers(first_dense="first_k_dense_replace"),
    shared_expert_module="mlp.shared_experts",
    attention=LATENT_ATTENTION,
)
