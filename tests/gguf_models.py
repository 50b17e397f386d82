"""Tiny models of the families that go to GGUF, as llama.cpp computes them."""

from typing import Any

import torch
from around_dense import build_around
from around_families import AROUND
from dense_families import MULTIPLIERS, build_dense
from derived_families import DERIVED
from families import build

from moetool.format.gguf.families import READ

WINDOW, WHOLE, LINEAR = "sliding_attention", "full_attention", "linear_attention"
# Gemma 4's small models share keys and values between layers, and give each layer a vector of each token.
_SHARING = {
    "num_hidden_layers": 4,
    "layer_types": [WINDOW, WHOLE] * 2,
    "sliding_window": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}
_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "intermediate_size": 64,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_YARN = {**_PLAIN_ROPE, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
_SLOWED = {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG_ROPE = {
    "original_max_position_embeddings": 32,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0]},
}
_DELTA_RULE = {
    "layer_types": [LINEAR, LINEAR, WHOLE],
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
}
_BLOCKS_OF_TEXT = {
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": [WHOLE, *["minimax_m3_sparse"] * 2],
    "shared_intermediate_size": 48,
    "swiglu_limit": 7.0,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 16,
    "index_topk_blocks": 4,
    "rotary_dim": 4,
    "rope_parameters": {**_PLAIN_ROPE, "partial_rotary_factor": 0.5},
}
_DOTS3 = {
    "num_hidden_layers": 4,
    "layer_types": ["indexed_attention", WINDOW, "indexed_attention", WINDOW],
    "use_sliding_window": True,
    "sliding_window": 16,
    "head_dim": 16,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 24,
    "swa_head_dim": 20,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 12,
    "index_topk": 12,
    "index_head_dim": 64,
    "index_n_heads": 6,  # of which not all are at nought, so that no places are alike
    "n_shared_experts": 2,
}
_BAILING_HYBRID = {
    **_LATENT,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "num_experts": 8,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, WHOLE, LINEAR, WHOLE],
    "head_dim": 16,
    "short_conv_kernel_size": 3,
    "num_expert_group": 4,
    "topk_group": 2,
    "num_shared_experts": 2,
    "kda_lower_bound": -3.0,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-6,
    "rope_parameters": _PLAIN_ROPE,
}
_DEEPSEEK_V4 = {
    "max_position_embeddings": 256,
    "num_hidden_layers": 4,
    "layer_types": [WINDOW, "heavily_compressed_attention", "compressed_sparse_attention", WINDOW],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "num_key_value_heads": 1,
    "num_attention_heads": 4,
    "head_dim": 16,
    "v_head_dim": 16,
    "qk_rope_head_dim": 8,
    "sliding_window": 16,
    "moe_intermediate_size": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 6,
    "index_head_dim": 64,
    "index_topk": 6,
    "swiglu_limit": 0.5,
}
_QWEN4_EXP = {
    **_DELTA_RULE,
    "num_experts": 12,
    "moe_intermediate_size": 32,
    "hc_count": 2,
    "hc_lowrank": 16,
    "head_dim": 32,
    "indexer_n_heads": 16,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "rope_parameters": {**_PLAIN_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
}
_HY_V4 = {
    "index_topk": 12,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
}
_FALCON_H1 = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.6, 0.9, 1.2, 1.4, 0.8],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.45,
}

# By name: the family, if it is another, and entries of its config.
GGUF_MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "deepseek_v3-yarn": {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v3-scores": {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2}},
    "deepseek_v32-scores": {
        "index_topk": 64,
        "index_head_dim": 128,
        "rope_parameters": {**_YARN, "attention_factor": 1.3, "mscale_all_dim": 1.0},
    },
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_hidden_layers": 27},
    "deepseek_v32": {"index_topk": 12, "index_n_heads": 8, "index_head_dim": 64},
    "glm_moe_dsa": {"index_topk": 12, "index_n_heads": 8, "index_head_dim": 64},
    "glm_moe_dsa-shared": {
        "index_topk": 12,
        "index_n_heads": 8,
        "index_head_dim": 64,
        "indexer_types": ["full", "shared", "full"],
    },
    "glm4_moe_lite": _LATENT,
    "glm5_next": {
        "n_routed_experts": 16,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "moe_intermediate_size": 32,
        "linear_num_heads": 4,
        "index_n_heads": 16,
        "index_topk": 12,
        "swiglu_limit": 0.5,
        "hc_mult": 4,
    },
    "mistral4": _LATENT,
    "mistral4-long": {
        **_LATENT,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "glm4_moe": {},
    "solar_open": {},
    "dots1": {"layer_types": [WHOLE] * 3, "num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_layer_end_index": 3},
    "hunyuan_v1_moe": {},
    "hunyuan_v1_moe-dynamic": {
        "rope_parameters": {**_PLAIN_ROPE, "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    },
    "qwen3_moe-yarn": {"decoder_sparse_step": 1, "rope_parameters": {**_YARN, "attention_factor": 1.5}},
    "qwen3_moe-scales": {
        "decoder_sparse_step": 1,
        "rope_parameters": {**_YARN, "factor": None, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "minimax_m2": {},
    "minimax_m2-tied": {"tie_word_embeddings": True},
    "sarvam_moe": {},
    "sarvam_moe-partial": {"rope_parameters": {**_PLAIN_ROPE, "partial_rotary_factor": 0.5}},
    "exaone_moe": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "exaone_moe-slowed": {"mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": _SLOWED},
    "afmoe": {"num_hidden_layers": 4, "layer_types": [WINDOW] * 3 + [WHOLE], "global_attn_every_n_layers": 4},
    "afmoe-unshared": {
        "num_hidden_layers": 4,
        "layer_types": [WINDOW] * 3 + [WHOLE],
        "global_attn_every_n_layers": 4,
        "num_shared_experts": 0,
    },
    "kimi_linear": {
        "q_lora_rank": None,
        "linear_num_heads": 4,
        "num_expert_group": 4,
        "topk_group": 2,
        "rms_norm_eps": 1e-6,
    },
    "bailing_hybrid": _BAILING_HYBRID,
    "bailing_hybrid-weights": {
        **_BAILING_HYBRID,
        "moe_renormalize": False,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "layer_types": [WHOLE, LINEAR, LINEAR, WHOLE],
        "rope_parameters": {**_PLAIN_ROPE, "partial_rotary_factor": 0.5},  # as published, and without effect
        "expert_swiglu_limit_list": [0.0, None, 0.0, 1e4],
        "share_expert_swiglu_limit_list": [1e-2, 0.0, 1e4],
    },
    "dots3_note_text": _DOTS3,
    "dots3_note": _DOTS3,
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_v4-stretched": {
        **_DEEPSEEK_V4,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "hy_v3": {"moe_intermediate_size": 24, "num_experts": 6, "intermediate_size": 64, "head_dim": 8},
    "hy_v4": {**_HY_V4, "hc_mult": 2, "hc_magnitude": 1.7, "norm_topk_prob": False},
    "hy_v4_vl": _HY_V4,
    "lfm2_moe": {"routed_scaling_factor": 1.0, "tie_word_embeddings": True},
    "gpt_oss": {
        "intermediate_size": 24,
        "num_local_experts": 6,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "layer_types": [WINDOW, WHOLE] * 2,
        "sliding_window": 16,
        "rope_parameters": _PLAIN_ROPE,
    },
    "mellum": {
        "head_dim": 8,
        "num_experts": 6,
        "num_local_experts": 6,
        "moe_intermediate_size": 24,
        "intermediate_size": 64,
        "layer_types": [WINDOW, WHOLE, WINDOW],
        "sliding_window": 16,
        "rope_parameters": {WHOLE: _PLAIN_ROPE, WINDOW: _PLAIN_ROPE},
    },
    "gemma4_text": {
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 16,
        "layer_types": [WINDOW, WINDOW, WHOLE],
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gemma4": {},
    "gemma4_text-sharing": {
        **_SHARING,
        "global_head_dim": 16,
        "final_logit_softcapping": None,
        "vocab_size_per_layer_input": 320,
    },
    "qwen3_omni_moe_thinker": {},
    "llama4_text": {"attention_chunk_size": 8192},
    "llama4_text-slowed": {"attention_chunk_size": 8192, "rope_parameters": _SLOWED},
    "llama4": {"attention_chunk_size": 8192},
    "qwen3_vl_moe": {},
    "qwen3_5_moe": {},
    "glm4v_moe": {},
    "deepseek_ocr2": {"n_shared_experts": 2, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-3},
    "unlimited_ocr": {"sliding_window": 16, "num_experts_per_tok": 3},
    "cohere2_moe": {
        "intermediate_size": 24,
        "prefix_dense_intermediate_size": 64,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_experts": 6,
        "num_shared_experts": 1,
        "expert_selection_fn": "sigmoid",
        "head_dim": 8,
        "num_hidden_layers": 4,
        "layer_types": [WHOLE, WINDOW, WINDOW, WHOLE],
        "sliding_window": 16,
    },
    "mimo_v2_flash": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "head_dim": 12,
        "v_head_dim": 8,
        "sliding_window": 16,
    },
    "step3p7": {
        "num_hidden_layers": 4,
        "layer_types": [WINDOW, WHOLE, WINDOW, WHOLE],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "sliding_window": 16,
        "num_sliding_attention_heads": 6,
        "moe_router_scaling_factor": 2.5,
        "swiglu_limits": [0.0, None, 0.5, 0.7],
        "swiglu_limits_shared": [0.4, None, 0.6, 0.0],
        "rope_parameters": {
            WHOLE: {**_SLOWED, "partial_rotary_factor": 0.5},
            WINDOW: {**_PLAIN_ROPE, "rope_theta": 5e3},
        },
    },
    "laguna": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "head_dim": 8,
        "layer_types": [WHOLE, WINDOW, WINDOW],
        "sliding_window": 16,
        "shared_expert_intermediate_size": 24,
    },
    "laguna-heads": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "head_dim": 8,
        "num_attention_heads_per_layer": [2, 4, 4],
        "layer_types": [WHOLE, WINDOW, WINDOW],
        "sliding_window": 16,
        "rope_parameters": {WHOLE: {**_YARN, "partial_rotary_factor": 0.5}, WINDOW: _PLAIN_ROPE},
    },
    "qwen3_next": {"mlp_only_layers": []},
    "qwen3_5_moe_text": {
        **_DELTA_RULE,
        "head_dim": 128,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
    },
    "qwen4_exp_text": _QWEN4_EXP,
    "qwen4_exp_text-sparse": {**_QWEN4_EXP, "indexer_budget": 12, "indexer_compress_ratio": 1},
    "qwen4_exp_text-ngrams": {
        **_QWEN4_EXP,
        "ple_layer_ids": [2],
        "ngram_size": 5,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 12,
        "make_ngram_vocab_size_divisible_by": 8,
        "eos_token_id": [7, 3],
    },
    "qwen4_exp": _QWEN4_EXP,
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "intermediate_size": 24,
        "shared_intermediate_size": 40,
        "num_local_experts": 6,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3,
        "logits_scaling": 1.5,
    },
    "granitemoehybrid-unshared": {"shared_intermediate_size": 0, "position_embedding_type": "rope"},
    "ernie4_5_moe-unshared": {"moe_num_shared_experts": 0, "moe_layer_end_index": 3},
    "granitemoe_swa": {
        "shared_intermediate_size": 40,
        "layer_types": [WHOLE, WINDOW, WINDOW],
        "sliding_window": 16,
        "layer_rope_theta": [0.0, 2e4, 2e4],
        "attention_bias": True,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.5,
    },
    "minimax": {
        "layer_types": [LINEAR, LINEAR, WHOLE],
        "rms_norm_eps": 1e-6,
        **{f"{kind}_alpha_factor": 1.5 for kind in ("full_attn", "linear_attn", "mlp")},
    },
    "minimax_m3_vl_text": _BLOCKS_OF_TEXT,
    "minimax_m3_vl": _BLOCKS_OF_TEXT,
    "jamba": {
        "intermediate_size": 64,
        "num_experts": 6,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "nemotron_h-latent": {
        "moe_latent_size": 16,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "n_routed_experts": 8,
    },
    "nemotron_h": {
        "layers_block_type": [LINEAR, "moe", WHOLE, "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "n_routed_experts": 8,
        "head_dim": 8,
        "intermediate_size": 64,
    },
}


# Dense ones likewise, beside what `build_dense` gives them.
DENSE_GGUF_MODELS: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {"num_hidden_layers": 4, "query_pre_attn_scalar": 8, "sliding_window": 16},
    "gemma2-largest": {"num_hidden_layers": 46, "head_dim": 16, "query_pre_attn_scalar": 8},
    "gemma3": {"num_hidden_layers": 7, "sliding_window": 16},
    "gemma3-stretched": {
        "layer_types": [WINDOW, WHOLE, WINDOW],
        "sliding_window": 30,
        "final_logit_softcapping": 20.0,
        "rope_parameters": {
            WHOLE: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            WINDOW: {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma3-whole": {"layer_types": [WHOLE] * 3},
    "phi3": {},
    "phi3-partial": {"hidden_size": 64, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    "phi3-long": _LONG_ROPE,
    "phi3-short": {**_LONG_ROPE, "max_position_embeddings": 1024, "original_max_position_embeddings": 512},
    "olmo2": {},
    "olmo3": {},
    "olmo3-stretched": {
        "rope_parameters": {WHOLE: {**_YARN, "attention_factor": 1.2}, WINDOW: _PLAIN_ROPE},
    },
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
    "cohere": {"use_qk_norm": False, "logit_scale": 0.5},
    "cohere-largest": {"num_hidden_layers": 64},
    "cohere2": {"logit_scale": 0.5},
    "glm": {},
    "glm4": {"attention_bias": True},
    "starcoder2": {},
    "stablelm": {"use_qkv_bias": True},
    "stablelm-parallel": {"use_parallel_residual": True},
    "exaone4": {"layer_types": [WHOLE] * 3, "sliding_window": None, "rope_parameters": _SLOWED},
    "exaone4-largest": {"num_hidden_layers": 64, "layer_types": [*[WINDOW] * 3, WHOLE] * 16, "sliding_window": 16},
    "hunyuan_v1_dense": {},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False},
    "ministral3": {},
    "ministral3-long": {
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "nemotron": {"attention_bias": True, "mlp_bias": True},
    "arcee": {},
    "ernie4_5": {"use_bias": False},
    "olmo": {},
    "phi-partial": {"partial_rotary_factor": 0.5},
    "lfm2": {},
    "apertus": {"rope_parameters": _SLOWED},
    "falcon": {},
    "falcon-groups": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt2": {},
    "gpt_bigcode": {},
    "granite_swa": {**MULTIPLIERS, "sliding_window": 16, "layer_rope_theta": [0.0, 2e4, 2e4]},
    "jamba-dense": {},
    "nemotron_h-dense": {"n_routed_experts": 8},
    "iquestcoder": {},
    "internlm3": {"attention_bias": True, "mlp_bias": True},
    "internlm3-dynamic": {"rope_parameters": {**_PLAIN_ROPE, "rope_type": "dynamic", "factor": 6.0}},
    "falcon_h1": _FALCON_H1,
    "falcon_h1-normed": {
        **_FALCON_H1,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_n_groups": 2,
        "tie_word_embeddings": True,
    },
    "apertus1p5_text": {"output_vocab_size": None},
    "mpt": {"attn_config": {"clip_qkv": 0.5}},
    "mpt-heads": {"hidden_size": 96, "num_attention_heads": 6},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_neox-sequential": {"use_parallel_residual": False, "hidden_act": "gelu_new"},
    "bloom": {},
    "gemma4_text-dense": {
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "global_head_dim": 16,
        "sliding_window": 16,
    },
    "gemma4_text-sharing-dense": {**_SHARING, "global_head_dim": 16, "vocab_size_per_layer_input": 320},
    "granitemoehybrid-dense": MULTIPLIERS,
    "granitemoehybrid-attention": {
        **MULTIPLIERS,
        "layer_types": ["attention"] * 3,
        "position_embedding_type": "rope",
    },
    "qwen3_5_text": {"head_dim": 128},
}

# Families whose files are read as those of another, which computes the same.
READ_AS_ANOTHER = ("glm4_moe_lite", "internlm3", "iquestcoder", "solar_open")
# Of which moetool reads files, too.
READ_MODELS = [
    name
    for name in (*GGUF_MODELS, *DENSE_GGUF_MODELS)
    if {name.partition("-")[0], f"{name.partition('-')[0]}_text"} & {*READ, *READ_AS_ANOTHER}
]


def gguf_model(name: str, **changes: Any) -> Any:
    """A tiny model by its name above, with other entries of its config (of its language model's)."""
    family = name.partition("-")[0]
    if "/" in name:
        inner = DENSE_GGUF_MODELS.get(name.partition("/")[2], {})
        return build_around(name, **{"vocab_size": 320, **inner, **changes})
    if name in DENSE_GGUF_MODELS:
        return build_dense(family, **{"vocab_size": 320, **DENSE_GGUF_MODELS[name], **changes})
    own = {"vocab_size": 320, **GGUF_MODELS[name], **changes}
    if (around := AROUND.get(family)) is not None:
        return build(family, **{**around, "text_config": {**around["text_config"], **own}})
    model = build(family, **{**DERIVED.get(family, {}), **own})
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # which experts each token has
            chances = torch.rand(len(table), model.config.n_routed_experts, generator=torch.Generator().manual_seed(0))
            table.copy_(chances.topk(table.shape[1]).indices)
    return model
