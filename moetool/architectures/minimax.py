"""MiniMax-Text-01: 32 experts, top-2; lightning attention in most layers."""

from moetool.architectures.base import ATTENTION, NUMBERED, Architecture

ARCHITECTURE = Architecture(
    name="MiniMax",
    model_types=("minimax",),
    reference="https://arxiv.org/abs/2501.08313",
    block="block_sparse_moe",
    weights=NUMBERED,
    experts_key="num_local_experts",
    intermediate_key="intermediate_size",
    router_rule="softmax over all experts, top-k, renormalized to sum 1",
    attention=(*ATTENTION, "self_attn.qkv_proj", "self_attn.output_gate", "self_attn.out_proj"),
)
