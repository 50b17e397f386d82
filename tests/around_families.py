"""A tiny config of every family whose language model lies in another, by model type, and images for some."""

from typing import Any

import torch
from derived_families import DERIVED, GROUPED, LATENT_WITH_QUERIES, SPARSE_ATTENTION, WIDTHS
from families import COMMON
from torch import Tensor

IMAGE, VIDEO, START, END = range(288, 292)  # tokens that no text has
_TEXT = {**COMMON, "vocab_size": 296}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_QWEN = {**_TOKENS, "vision_start_token_id": START, "vision_end_token_id": END}
_GLM = {**_TOKENS, "image_start_token_id": START, "image_end_token_id": END, "video_start_token_id": 292}
_GLM |= {"video_end_token_id": 293}
_AXES = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}
_EYE = {"hidden_size": 16, "intermediate_size": 32, "patch_size": 4}
_MERGING = {**_EYE, "depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
_MERGING |= {"out_hidden_size": 32}
_LAYERS = {**_EYE, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}

_EXPERTS_OF_OCR = {
    **_TEXT,
    **WIDTHS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_SAM = {
    "hidden_size": 16,
    "output_channels": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "mlp_dim": 16,
    "downsample_channels": [8, 8],
    "global_attn_indexes": [0],
}
_ENCODER = {**_EYE, "num_hidden_layers": 1, "num_attention_heads": 2}

AROUND: dict[str, dict[str, Any]] = {
    "aria": {
        "image_token_index": IMAGE,
        "projector_patch_to_query_dict": {"4": 4},
        "text_config": {**_TEXT, **DERIVED["aria_text"], "head_dim": 8},
        "vision_config": {**_ENCODER, "model_type": "idefics3_vision", "image_size": 8},
    },
    "deepseek_ocr2": {
        "image_token_id": IMAGE,
        "text_config": {**_EXPERTS_OF_OCR, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        "vision_config": {
            "sam_config": _SAM,
            "encoder_config": {**_ENCODER, "num_key_value_heads": 2, "vocab_size": 8},
        },
    },
    "dots3_note": {
        **_TOKENS,
        "audio_token_id": 292,
        "text_config": {**_TEXT, **DERIVED["dots3_note_text"]},
        # Its eye has experts, too, in its last layer.
        "vision_config": {
            **_LAYERS,
            "moe_intermediate_size": 8,
            "pyramid_num_routed": [0, 4],
            "adapter_in_dim": 16,
            "adapter_out_dim": 32,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "feature_size": 16,
            "downsample_hidden_size": 8,
            "adapter_input_size": 16,
            "adapter_out_dim": 32,
        },
    },
    "gemma4": {
        **_TOKENS,
        "boi_token_id": START,
        "eoi_token_id": END,
        "audio_token_id": 292,
        "boa_token_id": 293,
        "eoa_token_index": 294,
        "text_config": {**_TEXT, **DERIVED["gemma4_text"]},
        "vision_config": {
            **_LAYERS,
            "model_type": "gemma4_vision",
            "global_head_dim": 8,
            "position_embedding_size": 64,
            "pooling_kernel_size": 2,
            "default_output_length": 16,
        },
    },
    "glm4v_moe": {
        **_GLM,
        "text_config": {
            **_TEXT,
            **GROUPED,
            **WIDTHS,
            "head_dim": 8,
            "first_k_dense_replace": 1,
            "rope_parameters": _AXES,
        },
        "vision_config": {**_MERGING, "image_size": 16},
    },
    "glm5_next": {
        **_GLM,
        "text_config": {
            **_TEXT,
            **SPARSE_ATTENTION,
            **GROUPED,
            **WIDTHS,
            "qk_rope_head_dim": 0,
            "head_dim": 0,
            "linear_head_dim": 8,
            "linear_num_heads": 2,
            "hc_mult": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "index_kpool": 4,
        },
        "vision_config": {**_MERGING, "image_size": 16, "projection_intermediate_size": 16},
    },
    "hy_v4_vl": {
        **_TOKENS,
        "text_config": {**_TEXT, **DERIVED["hy_v4"], "n_routed_experts": 8, "rope_parameters": _AXES},
        "vision_config": {**_ENCODER, "out_hidden_size": 32, "max_image_size": 16},
    },
    "inkling_mm_model": {
        "image_token_id": IMAGE,
        "audio_token_id": 292,
        "image_bos_token_id": START,
        "audio_bos_token_id": 293,
        "text_config": {**_TEXT, **DERIVED["inkling_text"]},
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4},
        "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
    },
    "kimi_k25": {
        **_QWEN,
        "projection_hidden_size": 16,
        "text_config": {
            **_TEXT,
            **LATENT_WITH_QUERIES,
            **GROUPED,
            **WIDTHS,
            "model_type": "deepseek_v3",
            "first_k_dense_replace": 1,
        },
        "vision_config": {**_LAYERS, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
    },
    "llama4": {
        "image_token_index": IMAGE,
        "text_config": {**_TEXT, **DERIVED["llama4_text"]},
        "vision_config": {
            **_ENCODER,
            "image_size": 16,
            "intermediate_size": 64,  # of four patches
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    },
    "minimax_m3_vl": {
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "projector_hidden_size": 32,
        "merged_hidden_size": 128,
        "text_config": {**_TEXT, **DERIVED["minimax_m3_vl_text"]},
        "vision_config": {**_LAYERS, "image_size": 16},
    },
    "mistral_large4": {
        "image_token_index": IMAGE,
        "text_config": {
            **_TEXT,
            **SPARSE_ATTENTION,
            **GROUPED,
            **WIDTHS,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "vision_config": {**_ENCODER, "model_type": "pixtral", "image_size": 16, "head_dim": 8},
    },
    "muse_spark": {
        **_TOKENS,
        "audio_token_id": 292,
        "out_hidden_size": 64,
        "projector_hidden_size": 16,
        "text_config": {
            **_TEXT,
            **WIDTHS,
            "num_local_experts": 6,
            "moe_hidden_size": 16,
            "head_dim": 8,
            "sliding_window": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        "vision_config": {**_ENCODER, "pos_emb_height": 4, "pos_emb_width": 4},
        "audio_config": {
            "patch_sizes": [2, 2],
            "hidden_sizes": [4, 8],
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "out_hidden_size": 32,
        },
    },
    "qwen3_5_moe": {
        **_QWEN,
        "text_config": {**_TEXT, **DERIVED["qwen3_5_moe_text"], "rope_parameters": _AXES},
        "vision_config": {**_MERGING, "num_position_embeddings": 16},
    },
    "qwen3_omni_moe_thinker": {
        **_TOKENS,
        "audio_token_id": 292,
        "audio_start_token_id": 293,
        "text_config": {**_TEXT, **WIDTHS, "num_experts": 6, "head_dim": 8, "rope_parameters": _AXES},
        "vision_config": {**_MERGING, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        "audio_config": {
            "num_mel_bins": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "d_model": 16,
            "output_dim": 32,
            "downsample_hidden_size": 8,
        },
    },
    "qwen3_vl_moe": {
        **_QWEN,
        "text_config": {**_TEXT, **WIDTHS, "num_local_experts": 6, "head_dim": 8, "rope_parameters": _AXES},
        "vision_config": {**_MERGING, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen4_exp": {
        **_QWEN,
        "text_config": {**_TEXT, **DERIVED["qwen4_exp_text"], "rope_parameters": _AXES},
        "vision_config": {**_MERGING, "num_position_embeddings": 16},
    },
    "step3p7": {
        "image_token_id": IMAGE,
        "text_config": {
            **_TEXT,
            **WIDTHS,
            "n_routed_experts": 6,
            "share_expert_dim": 40,
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "swiglu_limits": [0.0, 0.0, 0.5],
        },
        "vision_config": {**_ENCODER, "image_size": 16},
    },
    "unlimited_ocr": {
        "image_token_id": IMAGE,
        "text_config": _EXPERTS_OF_OCR,
        "vision_config": {"sam_config": _SAM, "encoder_config": {**_ENCODER, "image_size": 16}},
    },
}


def with_image(model_type: str, tokens: Tensor) -> dict[str, Tensor] | None:
    """What a model is called with for a text `[1, length]` in which an image takes the place of four tokens; `None` for
    a family whose images are not drawn here."""
    draw = torch.Generator().manual_seed(0)
    given = tokens[:1].clone()
    given[0, 4:10] = torch.tensor([START, IMAGE, IMAGE, IMAGE, IMAGE, END])
    kinds = (given == IMAGE).long()
    if model_type == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4))[None]
        patches = torch.rand(1, 16, 3 * 4 * 4, generator=draw)
        return {
            "input_ids": given,
            "pixel_values": patches,
            "image_position_ids": places,
            "mm_token_type_ids": kinds,
        }
    if model_type == "llama4":
        return {"input_ids": given, "pixel_values": torch.randn(1, 3, 16, 16, generator=draw)}
    if model_type in ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe"):
        patches = torch.randn(16, 3 * 2 * 4 * 4, generator=draw)
        grid = torch.tensor([[1, 4, 4]])
        return {"input_ids": given, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": kinds}
    return None
