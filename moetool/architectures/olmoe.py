"""OLMoE: 64 experts, top-8."""

from moetool.architectures.base import Architecture

ARCHITECTURE = Architecture(
    name="OLMoE",
    model_types=("olmoe",),
    reference="https://arxiv.org/abs/2409.02060",
    experts_key="num_experts",
    intermediate_key="intermediate_size",
    router_rule="softmax over all experts, top-k, renormalized if norm_topk_prob",
)
