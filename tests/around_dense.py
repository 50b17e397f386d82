"""A tiny config of dense language models that lie in models that see or hear: by the model around and, behind a slash,
the language model in it."""

from typing import Any

import torch
from around_families import AROUND, END, IMAGE, START, VIDEO
from dense_families import COMMON, DENSE_FAMILIES, GATED
from derived_dense import DERIVED_DENSE
from transformers import AutoConfig

from moetool.runtime.loading import model_class

_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_QWEN = {**GATED, "rms_norm_eps": 1e-6, "rope_parameters": _AXES}
_GLM = {
    **GATED,
    "hidden_size": 64,
    "rope_parameters": {**_AXES, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]},
}
# Language models whose config has no class of its own that predicts text.
_WITHIN: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": _QWEN,
    "qwen2_5_vl_text": _QWEN,
    "qwen2_5_omni_text": _QWEN,
    "qwen3_vl_text": {**_QWEN, "head_dim": 8},
    "glm4v_text": _GLM,
    "glm_ocr_text": {**_GLM, "head_dim": 16},
    "hunyuan_vl_text": {**_QWEN, "head_dim": 8, "rope_parameters": {**_AXES, "mrope_section": [1, 1, 1, 1]}},
    "paddleocr_vl_text": {**_QWEN, "head_dim": 8},
}

_EYE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_EYE |= {"patch_size": 4, "image_size": 16}
_MERGING = AROUND["qwen3_vl_moe"]["vision_config"]
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_INDEX = {"image_token_index": IMAGE}
_LLAVA = {**_INDEX, "vision_config": {**_EYE, "model_type": "clip_vision_model"}}
_SIGLIP = {**_INDEX, "vision_config": {**_EYE, "model_type": "siglip_vision_model"}}
_IDEFICS = {"image_token_id": IMAGE, "scale_factor": 2, "vision_config": {**_EYE, "num_channels": 3}}
_PIXTRAL = {**_INDEX, "vision_config": {**_EYE, "model_type": "pixtral", "head_dim": 8}}
_GLM_AROUND = {**_TOKENS, "vision_config": {**_MERGING, "out_hidden_size": 64, "image_size": 16}}
_EAR = AROUND["qwen3_omni_moe_thinker"]["audio_config"]

AROUND_DENSE: dict[str, dict[str, Any]] = {
    "gemma3/gemma3": {**_SIGLIP, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 4},
    "gemma4/gemma4_text-dense": AROUND["gemma4"],
    "mistral3/mistral": _PIXTRAL,
    "mistral3/ministral3-long": _PIXTRAL,
    "qwen2_vl/qwen2_vl_text": {
        **_TOKENS,
        "vision_config": {"embed_dim": 16, "hidden_size": 32, "depth": 1, "num_heads": 2, "patch_size": 4},
    },
    "qwen2_5_vl/qwen2_5_vl_text": {**_TOKENS, "vision_config": {**_MERGING, "fullatt_block_indexes": [1]}},
    "qwen2_5_omni_thinker/qwen2_5_omni_text": {
        **_TOKENS,
        "vision_config": {**_MERGING, "fullatt_block_indexes": [1]},
        "audio_config": _EAR,
    },
    "qwen3_vl/qwen3_vl_text": {**_TOKENS, "vision_config": _MERGING | {"deepstack_visual_indexes": [0, 1]}},
    "qwen3_5/qwen3_5_text": {**_TOKENS, "vision_config": _MERGING},
    "llava/llama": _LLAVA,
    "llava_next/mistral": _LLAVA,
    "llava_onevision/qwen2": _SIGLIP,
    "glm4v/glm4v_text": _GLM_AROUND,
    "glm_ocr/glm_ocr_text": _GLM_AROUND,
    "internvl/qwen3": {
        "image_token_id": IMAGE,
        "vision_config": {**_EYE, "image_size": [16, 16], "patch_size": [4, 4]},
    },
    "smolvlm/llama": _IDEFICS,
    "idefics3/llama": _IDEFICS,
    "lfm2_vl/lfm2": {"image_token_id": IMAGE, "vision_config": {**_EYE, "num_patches": 16}},
    "exaone4_5/exaone4": {**_TOKENS, "vision_config": {**_MERGING, "fullatt_block_indexes": [1]}},
    "lighton_ocr/qwen3": {"image_token_id": IMAGE, "vision_config": _PIXTRAL["vision_config"]},
    "paddleocr_vl/paddleocr_vl_text": {**_TOKENS, "vision_config": {**_EYE, "num_channels": 3}},
}

# Those that llama.cpp computes otherwise than transformers.
DIFFERING: dict[str, dict[str, Any]] = {
    "llava/granite": _LLAVA,
    "hunyuan_vl/hunyuan_vl_text": {
        "image_token_id": IMAGE,
        "vision_config": {**_EYE, "num_key_value_heads": 2, "out_hidden_size": 32},
    },
}


def text_config(name: str) -> dict[str, Any]:
    """The config of a tiny dense language model, with the type that it has within another."""
    if name == "mistral":
        return {**COMMON, **DENSE_FAMILIES[name][1], "sliding_window": None, "model_type": name}
    family = name.partition("-")[0]
    model_type, own = {**{key: (key, own) for key, own in DERIVED_DENSE.items()}, **DENSE_FAMILIES}.get(
        family, (family, _WITHIN.get(family, {}))
    )
    return {**COMMON, **own, "model_type": model_type}


def build_around(name: str, **changes: Any) -> Any:
    """A model that sees around a dense language model, by its name above; `changes` are of the latter's config."""
    model_type, _, inner = name.partition("/")
    own = {**AROUND_DENSE, **DIFFERING}[name]
    entries = {**own, "text_config": {**text_config(inner), **changes}}
    entries["tie_word_embeddings"] = entries["text_config"].get("tie_word_embeddings", False)
    config = AutoConfig.for_model(model_type, **entries)
    offset = 0.0 if inner.startswith(("gemma3", "gemma2", "gemma-")) else 1.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class({"model_type": model_type}).from_config(config).eval()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                drawn = torch.randn(parameter.shape)
                if parameter.ndim > 1:
                    parameter.copy_(drawn / parameter[0].numel() ** 0.5)
                else:
                    parameter.copy_((0.0 if path.endswith("bias") else offset) + 0.1 * drawn)
    return model
