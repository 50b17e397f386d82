"""Qwen2-MoE and Qwen1.5-MoE: fine-grained experts and a gated shared expert."""

from moetool.architectures.base import Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="Qwen2-MoE",
    model_types=("qwen2_moe",),
    reference="https://arxiv.org/abs/2407.10671",
    experts_key="num_experts",
    intermediate_key="moe_intermediate_size",
    router_rule="softmax over all experts, top-k, renormalized if norm_topk_prob",
    others=("shared_expert.", "shared_expert_gate."),
    moe_layers_rule=MoELayers(every=("decoder_sparse_step", -1), dense="mlp_only_layers"),
    shared_expert_module="mlp.shared_expert",
)
