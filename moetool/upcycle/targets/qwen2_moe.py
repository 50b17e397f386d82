"""The Qwen2-MoE family: biases on queries, keys and values, dense layers among the MoE layers, a gated shared
expert."""

from moetool.format.kinds.moe import MoESpec
from moetool.runtime.dense import DenseModel
from moetool.upcycle.targets.base import Target, common

# Of a shared expert that is only there because the family always has one. Fused kernels want a multiple of 64.
IDLE_WIDTH = 64


def sliding(dense: DenseModel) -> dict[str, object]:
    """Config keys of sliding windows, listed layer by layer: the families' own rules for them differ."""
    used = any(name in dense.features for name in ("sliding_window", "mixed_attention"))
    kinds = getattr(dense.config, "layer_types", None) or ["sliding_attention"] * dense.layers
    return {
        "use_sliding_window": used,
        "sliding_window": dense.config.sliding_window if used else None,
        "layer_types": list(kinds) if used else ["full_attention"] * dense.layers,
        "max_window_layers": dense.layers,
    }


def fine_grained(dense: DenseModel, spec: MoESpec) -> dict[str, object]:
    """Keys of `config.json` for fine-grained experts that the two Qwen families share."""
    return {
        **common(dense),
        "intermediate_size": dense.intermediate,
        "moe_intermediate_size": spec.intermediate,
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "norm_topk_prob": spec.shared != "med",
        "decoder_sparse_step": 1,
        "mlp_only_layers": spec.dense_layers,
        "router_aux_loss_coef": 0.001,
    }


def _entries(dense: DenseModel, spec: MoESpec) -> dict[str, object]:
    return {
        **fine_grained(dense, spec),
        **sliding(dense),
        "shared_expert_intermediate_size": IDLE_WIDTH if spec.shared == "none" else dense.intermediate,
        "qkv_bias": True,
    }


TARGET = Target(
    name="qwen2_moe",
    model_class="Qwen2MoeForCausalLM",
    entries=_entries,
    expresses=frozenset(
        {"qkv_bias", "dense_layers", "sliding_window", "mixed_attention", "shared_half", "shared_med", "head_dim"}
    ),
    shared_gate="mlp.shared_expert_gate.weight",
    has_idle_shared=True,
    biases=("q_proj", "k_proj", "v_proj"),
)
