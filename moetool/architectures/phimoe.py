"""Phi-3.5-MoE: 16 experts, top-2 by SparseMixer."""

from moetool.architectures.base import NUMBERED, Architecture

ARCHITECTURE = Architecture(
    name="Phi-3.5-MoE",
    model_types=("phimoe",),
    reference="https://arxiv.org/abs/2404.14219",
    block="block_sparse_moe",
    weights=NUMBERED,
    experts_key="num_local_experts",
    intermediate_key="intermediate_size",
    router_rule="SparseMixer: one expert after the other, each by a softmax over the logits near the highest",
)
