"""Qwen3-Next: 512 fine-grained experts and a gated shared expert; gated DeltaNet in most layers."""

from moetool.architectures.base import ATTENTION, Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="Qwen3-Next",
    model_types=("qwen3_next",),
    reference="https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct",
    experts_key=("num_experts", "num_local_experts"),
    intermediate_key="moe_intermediate_size",
    router_rule="softmax over all experts, top-k, renormalized if norm_topk_prob",
    others=("shared_expert.", "shared_expert_gate."),
    moe_layers_rule=MoELayers(every=("decoder_sparse_step", -1), dense="mlp_only_layers"),
    shared_expert_module="mlp.shared_expert",
    attention=(*ATTENTION, *(f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"))),
)
