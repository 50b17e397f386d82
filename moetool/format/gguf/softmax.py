"""Families whose router weighs experts by a softmax, as llama.cpp computes them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moetool.format.gguf.changes import head_norms
from moetool.format.gguf.dense import GRANITE_DENSE, MISTRAL
from moetool.format.gguf.family import GgufFamily
from moetool.format.gguf.routing import (
    ALL_BIASES,
    IF_RENORMALIZED,
    INNER_BIASES,
    N_SHARED,
    NOT_RENORMALIZED,
    NUM_SHARED,
    POST_ATTENTION,
    RENORMALIZED,
    SCALED,
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
    UNBIASED,
)
from moetool.format.gguf.words import EXPERT_WIDTH, GATING, SHARED_COUNT, SHARED_IN_TWO

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MIXTRAL = replace(MISTRAL, model_type="mixtral", is_moe=True)
_QWEN2_MOE = GgufFamily(
    "qwen2_moe",
    "qwen2moe",
    is_moe=True,
    is_square=True,
    has_shared=True,
    biases=INNER_BIASES,
    needs_head=True,
    experts_key="num_experts",
    width_key=EXPERT_WIDTH,
    shared_width="shared_expert_intermediate_size",
    computes=NOT_RENORMALIZED,
)
# llama.cpp's `qwen2moe` knows no routing weights that add up to one. Without its shared expert, which is idle in models
# that moetool has upcycled, a Qwen2-MoE that has them is a Mixtral with biases.
QWEN2_MOE_RENORMALIZED = replace(
    _MIXTRAL,
    model_type="qwen2_moe",
    biases=INNER_BIASES,
    leaves_out=("mlp.shared_expert.", "mlp.shared_expert_gate."),
)
_QWEN3_MOE = GgufFamily(
    "qwen3_moe",
    "qwen3moe",
    is_moe=True,
    has_head_norms=True,
    biases=INNER_BIASES,
    experts_key="num_experts",
    width_key=EXPERT_WIDTH,
    computes=RENORMALIZED,
)
_QWEN3_VL_MOE = replace(
    _QWEN3_MOE,
    model_type="qwen3_vl_moe_text",
    architecture="qwen3vlmoe",
    axes=(24, 20, 20),
    has_deep_stack=True,
)
_GRANITE_MOE = replace(GRANITE_DENSE, model_type="granitemoe", architecture="granitemoe", is_moe=True)


def _other_bases(config: "PreTrainedConfig") -> str | None:
    if len({base for base in config.layer_rope_theta if base}) != 1:
        return "it has rotary embeddings in at least one layer, with one base in all that have them (layer_rope_theta)"
    return None


_REFERENCE = "reference_sliding_attention"  # of layers that attend to all of a prompt, and to a window of the answer
_BASE = 10000.0  # of rotary embeddings, the only one with which llama.cpp computes `deepseek2-ocr`
# Entries that transformers' routers of models for OCR do not look at, and by what they compute.
_UNREAD: Mapping[str, object] = {"norm_topk_prob": False, "scoring_func": "softmax"}


def _other_reader(config: "PreTrainedConfig") -> str | None:
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default" or rope.get("rope_theta", _BASE) != _BASE:
        return f"rotary embeddings have the base {_BASE:.0f} and are not stretched (rope_parameters)"
    for key, known in _UNREAD.items():
        if (said := getattr(config, key, known)) != known:
            return f"{key} is {said!r}, and transformers, by which moetool computes, takes it for {known!r}"
    return None


def _moves_keys_wrongly(_: "PreTrainedConfig") -> str:
    return (
        "llama.cpp turns this model's keys wrongly when it moves them to other places of a text: leave --context-shift "
        "and --cache-reuse off, as they are by default."
    )


def _attends_to_whole_answers(config: "PreTrainedConfig") -> str:
    if _REFERENCE not in config.layer_types:
        return _moves_keys_wrongly(config)
    return (
        f"Of its own answer this model attends to the last {config.sliding_window} tokens (sliding_window), beside all "
        f"of the prompt; llama.cpp attends to all of both: longer answers differ. {_moves_keys_wrongly(config)}"
    )


def _window_of_answers(config: "PreTrainedConfig") -> int | None:
    """How many tokens of its answer a model attends to in every layer, beside all of the prompt; `None` for all."""
    return int(config.sliding_window) if {*config.layer_types} == {_REFERENCE} else None


# DeepSeek-V2 with ordinary attention, which reads pictures of pages.
_DEEPSEEK_OCR2 = GgufFamily(
    "deepseek_ocr2_text",
    "deepseek2-ocr",
    is_moe=True,
    leads_dense=True,
    groups_heads=False,
    has_shared=True,
    experts_key="n_routed_experts",
    width_key=EXPERT_WIDTH,
    around=("model.sam_model.", "model.qwen2_model.", "model.projector.", "model.view_seperator"),
    counts=N_SHARED,
    multipliers=SCALED,
    fixed=SOFTMAX,
    computes={**UNBIASED, "mlp_bias": (False,), "topk_method": ("greedy", "group_limited_greedy")},
    objection=_other_reader,
    remark=_moves_keys_wrongly,
    cutting="deepseek-v3",
)


_GRANITE_MOE_SWA = replace(
    _GRANITE_MOE,
    model_type="granitemoe_swa",
    architecture="granite_swa",
    has_shared=True,
    may_lack_shared=True,
    shared=SHARED_IN_TWO,
    shared_width="shared_intermediate_size",
    names={"self_attn.sinks": "attn_sinks.weight"},
    window_period=0,
    needs_windows=True,
    turns_by_layer=True,
    objection=_other_bases,
)
OF_SOFTMAX: tuple[GgufFamily, ...] = (
    _MIXTRAL,
    _QWEN2_MOE,
    _QWEN3_MOE,
    _QWEN3_VL_MOE,
    replace(_QWEN3_VL_MOE, model_type="qwen3_omni_moe_text"),
    GgufFamily(
        "olmoe",
        "olmoe",
        is_moe=True,
        has_head_norms=True,
        is_square=True,
        groups_heads=False,
        needs_head=True,
        experts_key="num_experts",
        computes={**NOT_RENORMALIZED, "clip_qkv": (None,)},
    ),
    _GRANITE_MOE,
    replace(
        _GRANITE_MOE,
        model_type="granitemoeshared",
        has_shared=True,
        may_lack_shared=True,
        shared_width="shared_intermediate_size",
    ),
    _GRANITE_MOE_SWA,
    replace(_GRANITE_MOE_SWA, model_type="granite_swa", is_moe=False, has_shared=False, shared_width=None),
    GgufFamily(
        "ernie4_5_moe",
        "ernie4_5-moe",
        is_moe=True,
        leads_dense=True,
        has_shared=True,
        may_lack_shared=True,
        experts_key="moe_num_experts",
        width_key=EXPERT_WIDTH,
        counts={"moe_num_shared_experts": SHARED_COUNT, "moe_layer_interval": "interleave_moe_layer_step"},
        computes={"moe_layer_interval": (1,), "use_bias": (False,), "moe_norm_min": (1e-12,)},
    ),
    GgufFamily(
        "hunyuan_v1_moe",
        "hunyuan-moe",
        is_moe=True,
        has_shared=True,
        experts_key="num_experts",
        width_key=EXPERT_WIDTH,
        names=head_norms("query_layernorm", "key_layernorm"),
        fixed={SHARED_COUNT: 1},
        stretches_rope=True,
        cutting="hunyuan",
    ),
    GgufFamily(
        "gpt_oss",
        "gpt-oss",
        is_moe=True,
        needs_head=True,
        biases=ALL_BIASES,
        width_key=EXPERT_WIDTH,
        names={
            **POST_ATTENTION,
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.router.bias": "ffn_gate_inp.bias",
        },
        fixed=SOFTMAX_OF_CHOSEN,
        computes={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,), "attention_bias": (True,)},
        window_period=2,
        cutting="gpt-4o",
    ),
    GgufFamily(
        "mellum",
        "mellum",
        is_moe=True,
        needs_head=True,
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
        counts=NUM_SHARED,
        multipliers={"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"},
        flags=IF_RENORMALIZED,
        choices={"expert_selection_fn": (GATING, {"softmax": 1, "sigmoid": 2})},
        computes={"shared_expert_combination_strategy": ("average",), **UNBIASED},
        window_period=0,
        needs_windows=True,
        windows_turn_alike=True,
        cutting="cohere2moe",
    ),
    _DEEPSEEK_OCR2,
    replace(
        _DEEPSEEK_OCR2,
        model_type="unlimited_ocr_text",
        around=(*_DEEPSEEK_OCR2.around, "model.vision_model.", "model.image_newline"),
        derived={"attention.sliding_window": _window_of_answers},
        sees_windows=True,
        remark=_attends_to_whole_answers,
    ),
)
