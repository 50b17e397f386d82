"""FlexOlmo: experts trained apart on data of their own, from one dense model; norms come after attention and MoE."""

from moetool.architectures.base import Architecture

ARCHITECTURE = Architecture(
    name="FlexOlmo",
    model_types=("flex_olmo",),
    reference="https://arxiv.org/abs/2507.07024",
    experts_key="num_experts",
    intermediate_key="intermediate_size",
    router_rule="softmax over all experts, top-k, renormalized if norm_topk_prob",
)
