"""A tiny random model of every dense family that is known by nothing but transformers' own class."""

from typing import Any

GATED = {"intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": False}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
SMALL_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 16}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
GPT2 = {"n_inner": 64, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}

# By model type: what its config has beyond `COMMON`.
DERIVED_DENSE: dict[str, dict[str, Any]] = {
    "apertus": GATED,
    "apertus1p5_text": {**GATED, "output_vocab_size": 272},
    "arcee": GATED,
    "bamba": {**GATED, **SMALL_MAMBA, "attn_layer_indices": [1]},
    "biogpt": {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "bloom": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "codegen": {"n_inner": 64, "rotary_dim": 4},
    "ctrl": {"dff": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "cwm": {**GATED, "head_dim": 8, "sliding_window": 8, "layer_types": MIXED},
    "diffllama": GATED,
    "doge": {**GATED, "keep_window_size": 64},
    "falcon_h1": {**GATED, **SMALL_MAMBA, "mamba_d_ssm": 64, "mlp_multipliers": [0.5, 2.0]},
    "gemma4_text": {
        **GATED,
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 8,
        "layer_types": [*MIXED[:2], "full_attention"],
    },
    "gemma4_unified_text": {
        **GATED,
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": 8,
        "layer_types": [*MIXED[:2], "full_attention"],
    },
    "gpt2": GPT2,
    "gpt-sw3": GPT2,
    "gpt_neo": {
        "intermediate_size": 64,
        "attention_types": [[["global", "local", "global"], 1]],
        "window_size": 8,
    },
    "gpt_neox_japanese": {"intermediate_multiple_size": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gptj": {"n_inner": 64, "rotary_dim": 4},
    "granite_swa": {**GATED, "sliding_window": 8, "layer_types": MIXED},
    "granitemoehybrid": {
        **GATED,
        **SMALL_MAMBA,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 48,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "helium": {**GATED, "head_dim": 8},
    "hyperclovax": GATED,
    "internlm3": {**GATED, "head_dim": 8},
    "iquestcoder": {**GATED, "head_dim": 8},
    "jais2": GATED,
    "jamba": {
        **GATED,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "lfm2": {**GATED, "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1]},
    "lfm3": {**GATED, "block_auto_adjust_ff_dim": False},
    "minicpm3": {**GATED, **LATENT, "num_key_value_heads": 4},
    "ministral": {**GATED, "head_dim": 8, "sliding_window": 8, "layer_types": MIXED},
    "ministral3": {**GATED, "head_dim": 8},
    "modernbert-decoder": {
        "intermediate_size": 48,
        "local_attention": 8,
        "layer_types": MIXED,
        "cls_token_id": 0,
        "sep_token_id": 0,
    },
    "mpt": {"expansion_ratio": 2, "max_seq_len": 128},
    "nanochat": GATED,
    "nemotron": {**GATED, "head_dim": 8},
    "nemotron_h": {
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
        "num_hidden_layers": 4,
        "n_routed_experts": 0,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "use_mamba_kernels": False,
    },
    "olmo_hybrid": {**GATED, **DELTA, "linear_num_value_heads": 2, "layer_types": LINEAR},
    "openai-gpt": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "persimmon": {"intermediate_size": 64, "hidden_dropout": 0.0},
    "qwen3_5_text": {**GATED, **DELTA, "head_dim": 8, "layer_types": LINEAR},
    "recurrent_gemma": {
        "intermediate_size": 96,
        "num_key_value_heads": 1,
        "lru_width": 32,
        "attention_window_size": 16,
        "block_types": ["recurrent", "attention"],
    },
    "stablelm": GATED,
    "trocr": {"d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, **NO_DROPOUT},
    "vaultgemma": {**GATED, "head_dim": 8, "sliding_window": 8, "layer_types": MIXED},
    "xglm": {"ffn_dim": 64, "d_model": 32, "attention_heads": 4, "num_layers": 3, **NO_DROPOUT},
    "youtu": {**GATED, **LATENT, "num_key_value_heads": 4},
}

# Encoders, which only moefy takes, beside BERT.
_BERT = {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS: dict[str, dict[str, Any]] = {
    "roberta": {**_BERT, "max_position_embeddings": 130},
    "xlm-roberta": {**_BERT, "max_position_embeddings": 130},
    "electra": {**_BERT, "embedding_size": 32},
    "deberta": {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "dropout": 0.0, "attention_dropout": 0.0},
    "modernbert": {
        "intermediate_size": 48,
        "local_attention": 8,
        "layer_types": MIXED,
        "cls_token_id": 0,
        "sep_token_id": 0,
    },
}
