"""Granite-MoE with a shared expert, which lies beside the MoE block (`shared_mlp`) and may be absent."""

from moetool.architectures.base import Architecture

ARCHITECTURE = Architecture(
    name="Granite-MoE-Shared",
    model_types=("granitemoeshared",),
    reference="https://huggingface.co/ibm-research/moe-7b-1b-active-shared-experts",
    block="block_sparse_moe",
    weights={"gate": "input_linear.weight", "up": "input_linear.weight", "down": "output_linear.weight"},
    router="router.layer.weight",
    experts_module="block_sparse_moe.experts",
    experts_key="num_local_experts",
    intermediate_key="intermediate_size",
    router_rule="top-k of the logits, softmax over those k",
    shared_expert_module="shared_mlp",
    shared_expert={"gate": "input_linear.weight", "up": "input_linear.weight", "down": "output_linear.weight"},
)
