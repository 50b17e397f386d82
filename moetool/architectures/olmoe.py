"""OLMoE: 64 experts, top-8."""

from moetool.architectures.base import PROJECTIONS, Architecture

ARCHITECTURE = Architecture(
    name="OLMoE",
    model_types=("olmoe",),
    reference="https://arxiv.org/abs/2409.02060",
    layer="model.layers.{layer}",
    block="mlp",
    weights=PROJECTIONS,
    router="gate.weight",
    experts_module="mlp.experts",
    experts_key="num_experts",
    top_k_key="num_experts_per_tok",
    intermediate_key="intermediate_size",
    router_rule="softmax over all experts, top-k, renormalised if norm_topk_prob",
)
