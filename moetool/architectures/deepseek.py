"""DeepSeekMoE-16B, whose own code transformers 5 cannot run; `moetool.runtime.modules.deepseek` computes it instead."""

from moetool.architectures.base import Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="DeepSeekMoE",
    model_types=("deepseek",),
    reference="https://arxiv.org/abs/2401.06066",
    experts_key="n_routed_experts",
    intermediate_key="moe_intermediate_size",
    router_rule="softmax over all experts, top-k, renormalized if norm_topk_prob",
    router_options={"scoring_func": ("softmax",)},
    others=("shared_experts.",),
    moe_layers_rule=MoELayers(first_dense="first_k_dense_replace", every=("moe_layer_freq", 0)),
    shared_expert_module="mlp.shared_experts",
)
