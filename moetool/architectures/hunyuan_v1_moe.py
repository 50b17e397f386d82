"""Hunyuan-A13B: 64 experts, top-8, and a shared expert as wide as they are."""

from moetool.architectures.base import Architecture

ARCHITECTURE = Architecture(
    name="Hunyuan-MoE",
    model_types=("hunyuan_v1_moe",),
    reference="https://huggingface.co/tencent/Hunyuan-A13B-Instruct",
    router="gate.wg.weight",
    experts_key="num_experts",
    intermediate_key="intermediate_size",
    router_rule="softmax over all experts, top-k, renormalized to sum 1",
    top_k_key="moe_topk",
    others=("shared_mlp.",),
    shared_expert_module="mlp.shared_mlp",
)
