"""Granite-MoE: all experts of a layer in one tensor on disk."""

from moetool.architectures.base import Architecture

ARCHITECTURE = Architecture(
    name="Granite-MoE",
    model_types=("granitemoe",),
    reference="https://huggingface.co/ibm-granite/granite-3.0-3b-a800m-base",
    block="block_sparse_moe",
    weights={"gate": "input_linear.weight", "up": "input_linear.weight", "down": "output_linear.weight"},
    router="router.layer.weight",
    experts_module="block_sparse_moe.experts",
    experts_key="num_local_experts",
    intermediate_key="intermediate_size",
    router_rule="top-k of the logits, softmax over those k",
)
