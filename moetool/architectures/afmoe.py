"""Trinity (AFMoE): 128 experts, sigmoid scores with a correction bias, shared experts, leading dense layers."""

from moetool.architectures.base import ATTENTION, Architecture, MoELayers

ARCHITECTURE = Architecture(
    name="AFMoE",
    model_types=("afmoe",),
    reference="https://huggingface.co/arcee-ai/Trinity-Mini",
    router="router.gate.weight",
    experts_key="num_experts",
    intermediate_key="moe_intermediate_size",
    router_rule="sigmoid, top-k by corrected scores, renormalized to sum 1, times route_scale",
    router_options={"score_func": ("sigmoid",), "route_norm": (True,), "n_group": (1,)},
    router_others=("mlp.expert_bias",),
    others=("shared_experts.",),
    moe_layers_rule=MoELayers(first_dense="num_dense_layers"),
    shared_expert_module="mlp.shared_experts",
    attention=(*ATTENTION, "self_attn.gate_proj"),
)
