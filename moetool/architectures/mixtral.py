"""Mixtral: 8 experts, softmax over all, top-2, renormalized."""

from moetool.architectures.base import NUMBERED, Architecture

ARCHITECTURE = Architecture(
    name="Mixtral",
    model_types=("mixtral",),
    reference="https://arxiv.org/abs/2401.04088",
    block="block_sparse_moe",
    weights=NUMBERED,
    experts_key="num_local_experts",
    intermediate_key="intermediate_size",
    router_rule="softmax over all experts, top-k, renormalized to sum 1",
    aliases={".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."},
)
