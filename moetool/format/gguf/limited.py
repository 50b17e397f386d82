"""Families whose experts have limits on their gates, as llama.cpp computes them.

Source: https://github.com/ggml-org/llama.cpp (`conversion/step3.py`).
"""

from typing import TYPE_CHECKING

from moetool.format.gguf.family import HEAD_NORMS, GgufFamily, beside
from moetool.format.gguf.recurrent import plus_one
from moetool.format.gguf.routing import SCALE, SIGMOID_RENORMALIZED, UNBIASED
from moetool.format.gguf.words import EXPERT_WIDTH

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NORMS_PLUS_ONE = {
    name: plus_one(own)
    for name, own in {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "model.norm.weight": "output_norm.weight",
        **HEAD_NORMS,
    }.items()
}


def _other_step(config: "PreTrainedConfig") -> str | None:
    if config.query_pre_attn_scalar != config.head_dim:
        return "it divides scores by the root of a head's width (query_pre_attn_scalar)"
    return None


OF_LIMITED: tuple[GgufFamily, ...] = (
    GgufFamily(
        "step3p5",
        "step35",
        is_moe=True,
        mixes_layers=True,
        needs_head=True,
        is_partial=True,
        slows_rope=True,
        turns_shares=True,
        doubles_turned=True,
        experts_key="n_routed_experts",
        width_key=EXPERT_WIDTH,
        names={"self_attn.g_proj.weight": "attn_gate.weight", **beside("share_expert")},
        modules={"share_expert.": "mlp.shared_experts."},
        changes=_NORMS_PLUS_ONE,
        multipliers={"moe_router_scaling_factor": SCALE},
        of_layers={"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"},
        fixed=SIGMOID_RENORMALIZED,
        computes={
            **UNBIASED,
            "gating": (True, "per-head"),
            "mlp_bias": (False,),
            "use_bidirectional_attention": (False, None),
        },
        objection=_other_step,
        window_period=0,
        needs_windows=True,
    ),
)
