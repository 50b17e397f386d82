"""A tiny random model of every dense family, as its checkpoints lie on the hub."""

from typing import Any

import derived_dense
import torch
from transformers import AutoConfig

from moetool.runtime.loading import model_class

COMMON: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GATED = {"intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": False}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}

# By what a test calls it: model type, and what its config has beyond `COMMON`.
DENSE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**GATED, "rope_theta": 50000.0, "rms_norm_eps": 1e-4}),
    "llama-rope-scaled": (
        "llama",
        {
            **GATED,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-wide-heads": ("llama", {**GATED, "head_dim": 16, "tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {**GATED, "attention_bias": True}),
    "llama-mlp-bias": ("llama", {**GATED, "mlp_bias": True}),
    "mistral": ("mistral", {**GATED, "sliding_window": 8}),
    "qwen2": ("qwen2", GATED),
    "qwen2-windows": (
        "qwen2",
        {**GATED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**GATED, "head_dim": 16}),
    "olmo2": ("olmo2", GATED),
    "phi3": ("phi3", {**GATED, "sliding_window": None}),
    "phi3-longrope": (
        "phi3",
        {
            **GATED,
            "sliding_window": None,
            "original_max_position_embeddings": 32,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 2.5, 3.0, 4.0],
            },
        },
    ),
    "gemma": ("gemma", {**GATED, "head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**GATED, "head_dim": 8, "tie_word_embeddings": True, "sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        {**GATED, "head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True, "sliding_window": 8},
    ),
    "granite": ("granite", {**GATED, **MULTIPLIERS}),
    "smollm3": ("smollm3", {**GATED, "no_rope_layers": [1, 0, 1]}),
    "olmo": ("olmo", {**GATED, "clip_qkv": 2.0}),
    "olmo3": ("olmo3", {**GATED, "sliding_window": 8, "layer_types": MIXED}),
    "cohere": ("cohere", {**GATED, "tie_word_embeddings": True, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**GATED, "tie_word_embeddings": True, "sliding_window": 8, "layer_types": MIXED}),
    "glm": ("glm", {**GATED, "head_dim": 8}),
    "glm4": ("glm4", {**GATED, "head_dim": 8}),
    "exaone4": ("exaone4", {**GATED, "sliding_window": 8, "layer_types": MIXED}),
    "ernie4_5": ("ernie4_5", {**GATED, "head_dim": 16, "use_bias": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {**GATED, "head_dim": 16}),
    "seed_oss": ("seed_oss", {**GATED, "head_dim": 8}),
    "gpt_neox": ("gpt_neox", {"intermediate_size": 64, "tie_word_embeddings": False}),
    "phi": ("phi", {"intermediate_size": 64}),
    "gpt_bigcode": ("gpt_bigcode", {"n_inner": 64}),
    "starcoder2": ("starcoder2", {"intermediate_size": 64, "num_key_value_heads": 2}),
    "falcon": ("falcon", {"ffn_hidden_size": 64, "new_decoder_architecture": False, "bias": False}),
}

# Those that only moefy takes, and OPT, whose networks are no modules of their own.
MOEFY_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", derived_dense.DERIVED_DENSE["opt"]),
    "bert": ("bert", {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}


def build_dense(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A model at the scales of a trained one: norms and biases, too, are not what they are initialised to."""
    derived = {name: (name, own) for name, own in {**derived_dense.DERIVED_DENSE, **derived_dense.ENCODERS}.items()}
    model_type, own = {**derived, **DENSE_FAMILIES, **MOEFY_FAMILIES}[family]
    config = AutoConfig.for_model(model_type, **{**COMMON, **own, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class({"model_type": model_type}).from_config(config).eval()
        offset = 0.0 if model_type in ("gemma", "gemma2", "gemma3_text") else 1.0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2:
                    parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
                elif name.endswith("bias"):
                    parameter.copy_(0.1 * torch.randn(parameter.shape))
                else:
                    parameter.copy_(offset + 0.1 * torch.randn(parameter.shape))
    return model.to(dtype)
