"""Solar Open: 128 experts, sigmoid scores with a correction bias, one shared expert."""

from moetool.architectures.base import Architecture

ARCHITECTURE = Architecture(
    name="Solar-Open",
    model_types=("solar_open",),
    reference="https://huggingface.co/upstage/Solar-Open-100B",
    experts_key="n_routed_experts",
    intermediate_key="moe_intermediate_size",
    router_rule="sigmoid, top-k of the best groups by corrected scores, renormalized, times routed_scaling_factor",
    router_options={"first_k_dense_replace": (0,)},
    others=("shared_experts.", "gate.e_score_correction_bias"),
    groups_keys=("n_group", "topk_group"),
    shared_expert_module="mlp.shared_experts",
)
