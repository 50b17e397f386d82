"""DeepSeek-V2: latent attention, leading dense layers, shared experts beside the routed ones."""

from moetool.architectures.base import LATENT_ATTENTION, Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="DeepSeek-V2",
    model_types=("deepseek_v2",),
    reference="https://arxiv.org/abs/2405.04434",
    experts_key="n_routed_experts",
    intermediate_key="moe_intermediate_size",
    router_rule="softmax over all experts, top-k (of the best groups), times routed_scaling_factor",
    router_options={
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
        "moe_layer_freq": (1,),
    },
    others=("shared_experts.",),
    groups_keys=("n_group", "topk_group"),
    moe_layers_rule=MoELayers(first_dense="first_k_dense_replace"),
    shared_expert_module="mlp.shared_experts",
    attention=LATENT_ATTENTION,
)
