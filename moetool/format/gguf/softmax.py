"""Dense families, and those whose router gives experts weights by a softmax, as they are written to GGUF."""

from dataclasses import replace

from moetool.format.gguf.family import GgufFamily
from moetool.format.gguf.routing import (
    ALL_BIASES,
    GRANITE,
    IF_RENORMALIZED,
    INNER_BIASES,
    NOT_RENORMALIZED,
    POST_ATTENTION,
    RENORMALIZED,
    SHARED_COUNT,
    SOFTMAX_OF_CHOSEN,
)
from moetool.format.gguf.words import EXPERT_WIDTH, GATING

DENSE: tuple[GgufFamily, ...] = (
    GgufFamily("llama", "llama", is_moe=False, is_read=True, is_interleaved=True, biases=ALL_BIASES),
    GgufFamily("mistral", "llama", is_moe=False, is_read=True, is_interleaved=True),
    GgufFamily("qwen2", "qwen2", is_moe=False, is_read=True, is_square=True, biases=INNER_BIASES),
    GgufFamily("qwen3", "qwen3", is_moe=False, is_read=True, has_head_norms=True, biases=INNER_BIASES),
    GgufFamily(
        "granite", "granite", is_moe=False, is_read=True, is_interleaved=True, biases=ALL_BIASES, multipliers=GRANITE
    ),
)

_QWEN2_MOE = GgufFamily(
    "qwen2_moe",
    "qwen2moe",
    is_moe=True,
    is_read=True,
    is_square=True,
    has_shared=True,
    biases=INNER_BIASES,
    needs_head=True,
    experts_key="num_experts",
    width_key=EXPERT_WIDTH,
    shared_width="shared_expert_intermediate_size",
    computes=NOT_RENORMALIZED,
)
# Routing weights that add up to one are beyond its own architecture. Less its shared expert, which moetool's upcycled
# models have idle, it is a Mixtral with biases.
QWEN2_MOE_RENORMALIZED = GgufFamily(
    "qwen2_moe",
    "llama",
    is_moe=True,
    is_interleaved=True,
    biases=INNER_BIASES,
    leaves_out=("mlp.shared_expert.", "mlp.shared_expert_gate."),
)
_QWEN3_MOE = GgufFamily(
    "qwen3_moe",
    "qwen3moe",
    is_moe=True,
    is_read=True,
    has_head_norms=True,
    biases=INNER_BIASES,
    experts_key="num_experts",
    width_key=EXPERT_WIDTH,
    computes=RENORMALIZED,
)
_GRANITE_MOE = GgufFamily(
    "granitemoe", "granitemoe", is_moe=True, is_read=True, is_interleaved=True, biases=ALL_BIASES, multipliers=GRANITE
)
OF_SOFTMAX: tuple[GgufFamily, ...] = (
    GgufFamily("mixtral", "llama", is_moe=True, is_read=True, is_interleaved=True),
    _QWEN2_MOE,
    _QWEN3_MOE,
    replace(
        _QWEN3_MOE,
        model_type="qwen3_vl_moe_text",
        architecture="qwen3vlmoe",
        axes=(24, 20, 20),
        has_deep_stack=True,
        is_read=False,
    ),
    GgufFamily(
        "olmoe",
        "olmoe",
        is_moe=True,
        is_read=True,
        has_head_norms=True,
        is_square=True,
        groups_heads=False,
        needs_head=True,
        experts_key="num_experts",
        computes={**NOT_RENORMALIZED, "clip_qkv": (None,)},
    ),
    _GRANITE_MOE,
    replace(_GRANITE_MOE, model_type="granitemoeshared", has_shared=True, shared_width="shared_intermediate_size"),
    GgufFamily(
        "ernie4_5_moe",
        "ernie4_5-moe",
        is_moe=True,
        leads_dense=True,
        has_shared=True,
        experts_key="moe_num_experts",
        width_key=EXPERT_WIDTH,
        counts={"moe_num_shared_experts": SHARED_COUNT, "moe_layer_interval": "interleave_moe_layer_step"},
        computes={"moe_layer_interval": (1,), "use_bias": (False,)},
    ),
    GgufFamily(
        "hunyuan_v1_moe",
        "hunyuan-moe",
        is_moe=True,
        has_shared=True,
        experts_key="num_experts",
        width_key=EXPERT_WIDTH,
        names={f"self_attn.{one}_layernorm.weight": f"attn_{one[0]}_norm.weight" for one in ("query", "key")},
        fixed={SHARED_COUNT: 1},
        cutting="hunyuan",
    ),
    GgufFamily(
        "gpt_oss",
        "gpt-oss",
        is_moe=True,
        biases=ALL_BIASES,
        width_key=EXPERT_WIDTH,
        names={
            **POST_ATTENTION,
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.router.bias": "ffn_gate_inp.bias",
        },
        fixed=SOFTMAX_OF_CHOSEN,
        computes={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        window_period=2,
        cutting="gpt-4o",
    ),
    GgufFamily(
        "mellum",
        "mellum",
        is_moe=True,
        has_head_norms=True,
        width_key=EXPERT_WIDTH,
        computes=RENORMALIZED,
        window_period=0,
        windows_turn_alike=True,
        cutting="mellum2",
    ),
    GgufFamily(
        "cohere2_moe",
        "cohere2moe",
        is_moe=True,
        leads_dense=True,
        has_shared=True,
        experts_key="num_experts",
        width_key=EXPERT_WIDTH,
        dense_width="prefix_dense_intermediate_size",
        counts={"num_shared_experts": SHARED_COUNT},
        multipliers={"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"},
        flags=IF_RENORMALIZED,
        choices={"expert_selection_fn": (GATING, {"softmax": 1, "sigmoid": 2})},
        computes={"shared_expert_combination_strategy": ("average",), "attention_bias": (False,)},
        window_period=0,
        windows_turn_alike=True,
        cutting="cohere2moe",
    ),
)
