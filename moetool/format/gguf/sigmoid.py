"""Families whose router weighs experts by a sigmoid, as llama.cpp computes them; latent attention is in `latent`."""

from dataclasses import replace
from typing import TYPE_CHECKING

from moetool.format.gguf.changes import nearest
from moetool.format.gguf.family import GgufFamily, beside, without_experts
from moetool.format.gguf.routing import (
    INNER_BIASES,
    NOT_SCALED,
    NUM_SHARED,
    POST_ATTENTION,
    RENORMALIZED,
    ROUTED_AS_DEEPSEEK,
    SCALE,
    SIGMOID,
    SIGMOID_RENORMALIZED,
    UNBIASED,
)
from moetool.format.gguf.words import EMBEDDINGS, EXPERT_WIDTH

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_GLM4_MOE = replace(
    ROUTED_AS_DEEPSEEK,
    model_type="glm4_moe",
    architecture="glm4moe",
    is_partial=True,
    has_head_norms=True,
    biases=INNER_BIASES,
    names=POST_ATTENTION,
    cutting="glm4",
)
# As Ling 2.0, whose files it reads, too.
_SARVAM_MOE = replace(
    ROUTED_AS_DEEPSEEK,
    model_type="sarvam_moe",
    architecture="bailingmoe2",
    is_partial=True,
    is_square=True,
    needs_head=True,
    names={
        "attention.dense.weight": "attn_output.weight",
        "attention.query_layernorm.weight": "attn_q_norm.weight",
        "attention.key_layernorm.weight": "attn_k_norm.weight",
    },
    outside={"model.embed_tokens.weight": "", "model.word_embeddings.weight": EMBEDDINGS},
    modules={"attention.dense": "self_attn.o_proj"},
    changes={"attention.query_key_value.weight": nearest("attn_qkv.weight")},  # of three modules of transformers'
    computes={**UNBIASED, "n_shared_experts": (1,), "use_qk_norm": (True,)},
)
_EXAONE_MOE = replace(
    ROUTED_AS_DEEPSEEK,
    model_type="exaone_moe",
    architecture="exaone-moe",
    has_head_norms=True,
    needs_head=True,
    experts_key="num_experts",
    counts=NUM_SHARED,
    window_period=0,
    needs_windows=True,
    slows_rope=True,
    cutting="exaone-moe",
)
_AFMOE = replace(
    ROUTED_AS_DEEPSEEK,
    model_type="afmoe",
    architecture="afmoe",
    may_lack_shared=True,
    has_head_norms=True,
    groups_experts=False,
    experts_key="num_experts",
    names={
        **POST_ATTENTION,
        "pre_mlp_layernorm.weight": "ffn_norm.weight",
        "post_mlp_layernorm.weight": "post_ffw_norm.weight",
        "self_attn.gate_proj.weight": "attn_gate.weight",
    },
    counts=NUM_SHARED,
    multipliers={"route_scale": SCALE},
    flags={},
    fixed=SIGMOID_RENORMALIZED,
    computes={"mup_enabled": (True,), **UNBIASED},
    window_period=4,
    cutting="afmoe",
)


def _other_llama4(config: "PreTrainedConfig") -> str | None:
    """Why llama.cpp computes another Llama 4 than this config's; `None` if it does not."""
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
    replace(
        ROUTED_AS_DEEPSEEK,
        model_type="dots1",
        architecture="dots1",
        has_head_norms=True,
        groups_heads=False,
        needs_head=True,
    ),
    _SARVAM_MOE,
    _EXAONE_MOE,
    _AFMOE,
    replace(
        _AFMOE,
        model_type="hy_v3",
        architecture="hy_v3",
        has_shared=False,
        may_lack_shared=False,
        names={"mlp.expert_bias": "exp_probs_b", **beside("mlp.shared_mlp")},
        modules={"mlp.shared_mlp.": "mlp.shared_experts."},
        multipliers={"router_scaling_factor": SCALE},
        computes={**UNBIASED, "mlp_bias": (False,)},
        window_period=None,
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
        computes={**RENORMALIZED, **NOT_SCALED},
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
        fixed=SIGMOID_RENORMALIZED,
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
        dense=without_experts("feed_forward"),
        counts={"interleave_moe_layer_step": "interleave_moe_layer_step"},
        computes={
            "attention_chunk_size": (8192,),
            "floor_scale": (8192,),
            "attn_scale": (0.1,),
            "attn_temperature_tuning": (True,),
        },
        implied={"use_qk_norm": lambda config: config["num_local_experts"] != 128},
        objection=_other_llama4,
        slows_rope=True,
        cutting="llama4",
    ),
)
