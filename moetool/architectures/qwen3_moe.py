"""Qwen3-MoE: 128 fine-grained experts, no shared expert."""

from moetool.architectures.base import Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    reference="https://arxiv.org/abs/2505.09388",
    experts_key=("num_experts", "num_local_experts"),
    intermediate_key="moe_intermediate_size",
    router_rule="softmax over all experts, top-k, renormalized if norm_topk_prob",
    moe_layers_rule=MoELayers(every=("decoder_sparse_step", -1), dense="mlp_only_layers"),
)
