"""Families whose router gives experts weights by a sigmoid, as they are written to GGUF."""

from dataclasses import replace
from typing import TYPE_CHECKING

from moetool.architectures.shape import ROLES
from moetool.format.gguf.family import GgufFamily, beside
from moetool.format.gguf.routing import (
    IF_RENORMALIZED,
    INNER_BIASES,
    NORM,
    POST_ATTENTION,
    RENORMALIZED,
    SCALE,
    SCALED,
    SHARED_COUNT,
    SHARED_ONES,
    SIGMOID,
)
from moetool.format.gguf.words import EXPERT_WIDTH

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_GLM4_MOE = GgufFamily(
    "glm4_moe",
    "glm4moe",
    is_moe=True,
    leads_dense=True,
    is_partial=True,
    has_head_norms=True,
    groups_experts=True,
    has_shared=True,
    biases=INNER_BIASES,
    experts_key="n_routed_experts",
    width_key=EXPERT_WIDTH,
    names=POST_ATTENTION,
    counts=SHARED_ONES,
    multipliers=SCALED,
    flags=IF_RENORMALIZED,
    fixed=SIGMOID,
    cutting="glm4",
)
_LIKE_DOTS = GgufFamily(
    "dots1",
    "dots1",
    groups_heads=False,
    is_moe=True,
    leads_dense=True,
    has_head_norms=True,
    groups_experts=True,
    has_shared=True,
    experts_key="n_routed_experts",
    width_key=EXPERT_WIDTH,
    counts=SHARED_ONES,
    multipliers=SCALED,
    flags=IF_RENORMALIZED,
    fixed=SIGMOID,
)


def _other_llama4(config: "PreTrainedConfig") -> str | None:
    layers, step = range(1, config.num_hidden_layers + 1), config.interleave_moe_layer_step
    but_every_fourth = [bool(layer % 4) for layer in layers]
    if list(map(bool, config.no_rope_layers)) != but_every_fourth:
        return "it has no rotary embeddings in every fourth layer"
    if [kind == "chunked_attention" for kind in config.layer_types] != but_every_fourth:
        return "its attention sees all of a text in every fourth layer"
    if list(config.moe_layers) != [layer - 1 for layer in layers if layer % step == 0]:
        return "it has experts in every so many layers (interleave_moe_layer_step)"
    if config.use_qk_norm != (config.num_local_experts != 128):
        return "it norms queries and keys unless there are 128 experts"
    return None


OF_SIGMOID: tuple[GgufFamily, ...] = (
    _GLM4_MOE,
    replace(_GLM4_MOE, model_type="glm4v_moe_text", has_head_norms=False, axes=(8, 12, 12)),
    replace(_GLM4_MOE, model_type="solar_open", cutting="solar-open"),
    replace(_LIKE_DOTS, needs_head=True),
    replace(
        _LIKE_DOTS,
        model_type="exaone_moe",
        architecture="exaone-moe",
        needs_head=True,
        groups_heads=True,
        experts_key="num_experts",
        counts={"num_shared_experts": SHARED_COUNT},
        window_period=0,
        needs_windows=True,
        slows_rope=True,
        cutting="exaone-moe",
    ),
    replace(
        _LIKE_DOTS,
        model_type="afmoe",
        architecture="afmoe",
        groups_heads=True,
        groups_experts=False,
        experts_key="num_experts",
        names={
            **POST_ATTENTION,
            "pre_mlp_layernorm.weight": "ffn_norm.weight",
            "post_mlp_layernorm.weight": "post_ffw_norm.weight",
            "self_attn.gate_proj.weight": "attn_gate.weight",
        },
        counts={"num_shared_experts": SHARED_COUNT},
        multipliers={"route_scale": SCALE},
        flags={},
        fixed={**SIGMOID, NORM: True},
        computes={"mup_enabled": (True,), "attention_bias": (False,)},
        window_period=4,
        cutting="afmoe",
    ),
    replace(
        _LIKE_DOTS,
        model_type="hy_v3",
        architecture="hy_v3",
        has_shared=False,
        names={
            "mlp.expert_bias": "exp_probs_b",
            **beside("mlp.shared_mlp"),
        },
        modules={"mlp.shared_mlp.": "mlp.shared_experts."},
        groups_heads=True,
        groups_experts=False,
        experts_key="num_experts",
        counts={"num_shared_experts": SHARED_COUNT},
        multipliers={"router_scaling_factor": SCALE},
        flags={},
        fixed={**SIGMOID, NORM: True},
        computes={"attention_bias": (False,), "mlp_bias": (False,)},
        cutting="hunyuan",
    ),
    GgufFamily(
        "minimax_m2",
        "minimax-m2",
        is_moe=True,
        needs_head=True,
        is_partial=True,
        has_head_norms=True,
        width_key=EXPERT_WIDTH,
        fixed=SIGMOID,
        cutting="minimax-m2",
    ),
    GgufFamily(
        "mimo_v2_flash",
        "mimo2",
        is_moe=True,
        needs_head=True,
        leads_dense=True,
        is_partial=True,
        varies_heads=True,
        groups_experts=True,
        experts_key="n_routed_experts",
        width_key=EXPERT_WIDTH,
        names={"self_attn.attention_sink_bias": "attn_sinks.weight"},
        multipliers={"attention_value_scale": "attention.value_scale"},
        fixed=SIGMOID,
        computes={**RENORMALIZED, "routed_scaling_factor": (1.0,)},
        window_period=0,
        needs_windows=True,
    ),
    GgufFamily(
        "laguna",
        "laguna",
        is_moe=True,
        leads_dense=True,
        is_partial=True,
        has_head_norms=True,
        experts_key="num_experts",
        width_key=EXPERT_WIDTH,
        names={
            "self_attn.g_proj.weight": "attn_gate.weight",
            "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
            **beside("mlp.shared_expert"),
        },
        modules={"mlp.shared_expert.": "mlp.shared_experts."},
        multipliers={"moe_routed_scaling_factor": SCALE},
        fixed={**SIGMOID, NORM: True},
        turns_shares=True,
        computes={"moe_router_logit_softcapping": (0.0,), "moe_apply_router_weight_on_input": (False,)},
        window_period=0,
        cutting="laguna",
    ),
    GgufFamily(
        "llama4_text",
        "llama4",
        is_moe=True,
        mixes_layers=True,
        has_shared=True,
        width_key=EXPERT_WIDTH,
        dense_width="intermediate_size_mlp",
        dense={f"feed_forward.{role}_proj.weight": f"ffn_{role}.weight" for role in ROLES},
        counts={"interleave_moe_layer_step": "interleave_moe_layer_step"},
        computes={
            "attention_chunk_size": (8192,),
            "floor_scale": (8192,),
            "attn_scale": (0.1,),
            "attn_temperature_tuning": (True,),
        },
        objection=_other_llama4,
        slows_rope=True,
        cutting="llama4",
    ),
)
