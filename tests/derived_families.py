"""A tiny config of every family whose architecture is derived, by model type; the rest of it is `families.COMMON`."""

from typing import Any

import families
from families import LATENT

GROUPED = {**families.GROUPED, "n_group": 2, "topk_group": 1}  # some routers want two experts per group
WIDTHS = {"intermediate_size": 64, "moe_intermediate_size": 24}
LATENT_WITH_QUERIES = {**LATENT, "q_lora_rank": 16}
SPARSE_ATTENTION = {**LATENT_WITH_QUERIES, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 8,
}
_ONE_DENSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}

DERIVED: dict[str, dict[str, Any]] = {
    "axk1": {**LATENT_WITH_QUERIES, **GROUPED, **WIDTHS, "first_k_dense_replace": 1},
    "axk2": {**LATENT_WITH_QUERIES, **GROUPED, **WIDTHS},
    "bailing_hybrid": {
        **LATENT_WITH_QUERIES,
        **WIDTHS,
        "num_experts": 8,
        "num_shared_experts": 1,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_expert_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "beam": {**WIDTHS, **_ONE_DENSE, "num_experts": 8, "n_group": 2, "topk_group": 1, "head_dim": 8},
    "cohere2_moe": {"intermediate_size": 24, "num_experts": 6, "head_dim": 8},
    "deepseek_v32": {**SPARSE_ATTENTION, **GROUPED, **WIDTHS, "first_k_dense_replace": 1},
    "deepseek_v4": {
        **LATENT_WITH_QUERIES,
        **WIDTHS,
        "n_routed_experts": 8,
        "swiglu_limit": 0.5,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "sliding_attention"],
    },
    "dots3_note_text": {
        **LATENT_WITH_QUERIES,
        **GROUPED,
        **WIDTHS,
        "shared_experts_intermediate_size": 24,
        "use_sliding_window": False,
        "first_k_dense_replace": 1,
    },
    "flint": {**WIDTHS, "num_experts": 6, "shared_expert_intermediate_size": 40, "head_dim": 8},
    "gemma4_text": {
        **WIDTHS,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "glm4_moe_lite": {**LATENT_WITH_QUERIES, **GROUPED, **WIDTHS, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**SPARSE_ATTENTION, **GROUPED, **WIDTHS, "first_k_dense_replace": 1},
    "granitemoe_swa": {"intermediate_size": 48, "num_local_experts": 6},
    "granitemoehybrid": {
        "intermediate_size": 48,
        "num_local_experts": 6,
        "shared_intermediate_size": 40,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "hy_v3": {**WIDTHS, "num_experts": 8, "head_dim": 8, "first_k_dense_replace": 1},
    "hy_v4": {
        **LATENT_WITH_QUERIES,
        **GROUPED,
        **WIDTHS,
        "first_k_dense_replace": 1,
        "indexer_types": ["full"] * 3,
        "swiglu_limit": 0.5,
    },
    "jamba": {
        "intermediate_size": 48,
        "num_experts": 6,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        **LATENT_WITH_QUERIES,
        **WIDTHS,
        "num_experts": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 2,
    },
    "kolibri1": {**WIDTHS, "num_local_experts": 8, "shared_expert_intermediate_size": 24, "head_dim": 8},
    "laguna": {
        **WIDTHS,
        **_ONE_DENSE,
        "num_experts": 8,
        "shared_expert_intermediate_size": 24,
        "head_dim": 8,
    },
    "mellum": {**WIDTHS, "num_experts": 6, "head_dim": 8},
    "mimo_v2_flash": {**WIDTHS, "n_routed_experts": 8, "head_dim": 8, "v_head_dim": 8},
    "minimax_m3_vl_text": {
        "intermediate_size": 24,
        "dense_intermediate_size": 64,
        "swiglu_limit": 0.5,
        "num_local_experts": 8,
        "head_dim": 8,
    },
    "mistral4": {
        **LATENT_WITH_QUERIES,
        "head_dim": 16,
        **GROUPED,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "qwen3_5_moe_text": {
        **WIDTHS,
        **_DELTA,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "qwen4_exp_text": {
        **WIDTHS,
        **_DELTA,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
}
