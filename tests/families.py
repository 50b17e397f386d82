"""A tiny random model of every family, as its checkpoints lie on the hub."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import moetool  # noqa: F401  (makes transformers know DeepSeekMoE)
from moetool.architectures import find_architecture
from moetool.runtime.loading import model_class

COMMON: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 1.5}

# Widths of experts are chosen so that the wide and the narrow way through the Gram matrices are both taken.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": 4},
    "phimoe": {"intermediate_size": 48, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "head_dim": 8,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "norm_topk_prob": True,
    },
    "olmoe": {"intermediate_size": 24, "num_experts": 6, "tie_word_embeddings": True},
    "flex_olmo": {"intermediate_size": 24, "num_experts": 6, "norm_topk_prob": True},
    "deepseek": {
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v2": {
        **LATENT,
        **GROUPED,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
    },
    "deepseek_v3": {
        **LATENT,
        **GROUPED,
        "q_lora_rank": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe": {
        **GROUPED,
        "head_dim": 8,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    },
    "granitemoe": {"intermediate_size": 48, "num_local_experts": 4, "tie_word_embeddings": True},
    "granitemoeshared": {
        "intermediate_size": 48,
        "shared_intermediate_size": 40,
        "num_local_experts": 4,
        "tie_word_embeddings": True,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "logits_scaling": 1.5,
    },
}


FAMILIES |= {
    "dots1": {
        **GROUPED,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "sliding_window": 16,
        "max_window_layers": 2,
    },
    "ernie4_5_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "moe_k": 2,
        "moe_num_experts": 6,
        "moe_num_shared_experts": 1,
        "moe_layer_end_index": 2,
        "num_hidden_layers": 4,
        "use_bias": False,
    },
    "hunyuan_v1_moe": {"intermediate_size": 24, "num_experts_per_tok": [2, 2, 2], "num_experts": 6, "head_dim": 8},
    "minimax": {"intermediate_size": 48, "num_local_experts": 4, "block_size": 16, "mlp_alpha_factor": 1.5},
    "minimax_m2": {"intermediate_size": 24, "num_local_experts": 6, "head_dim": 8},
    "lfm2_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
        "routed_scaling_factor": 1.5,
    },
    "qwen3_next": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "head_dim": 8,
        "mlp_only_layers": [1],
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "exaone_moe": {
        **{key: value for key, value in GROUPED.items() if key not in ("n_routed_experts", "n_shared_experts")},
        "num_experts": 8,
        "num_shared_experts": 1,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "longcat_flash": {
        **LATENT,
        "q_lora_rank": 16,
        "num_hidden_layers": 6,
        "num_layers": 3,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 6,
        "zero_expert_num": 3,
        "num_experts_per_tok": 3,
        "moe_topk": 3,
        "routed_scaling_factor": 1.5,
    },
    "solar_open": {**GROUPED, "moe_intermediate_size": 24, "head_dim": 8},
    "afmoe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "head_dim": 8,
        "sliding_window": 16,
        "global_attn_every_n_layers": 2,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
}


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A model whose experts are one shared matrix plus differences, at the scales of a trained one."""
    around = "text_config" in overrides
    config = AutoConfig.for_model(family, **{**({} if around else COMMON), **FAMILIES.get(family, {}), **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class({"model_type": family}).from_config(config).eval()
        with torch.no_grad():
            saved = model.state_dict()
            for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
                if name not in saved or not parameter.is_floating_point() or "decay" in name or "slope_rate" in name:
                    continue
                if parameter.ndim > 3:
                    parameter.copy_(torch.randn(parameter.shape) / parameter[0].numel() ** 0.5)
                elif parameter.ndim == 3:
                    shared = torch.randn(parameter.shape[1:])
                    own = torch.randn(parameter.shape)
                    parameter.copy_((shared + 0.4 * own) / parameter.shape[-1] ** 0.5)
                elif parameter.ndim == 2:
                    is_router = ".gate." in name or "router" in name
                    parameter.copy_(torch.randn(parameter.shape) * (2.0 if is_router else 1.0))
                    parameter.div_(parameter.shape[-1] ** 0.5)
                elif name.endswith("bias"):
                    parameter.copy_(0.1 * torch.randn(parameter.shape))
                else:
                    parameter.copy_(1 + 0.1 * torch.randn(parameter.shape))
    return model if model.dtype == dtype else model.to(dtype)  # which would also make complex numbers real


def add_prediction_layer(path: Path) -> None:
    """Put the tensors of a multi-token-prediction layer behind the last one, as the hub's files have them."""
    config = json.loads((path / "config.json").read_text())
    if not config.get("num_nextn_predict_layers"):
        return
    file = path / "model.safetensors"
    tensors = load_file(file)
    last = config["num_hidden_layers"]
    architecture = find_architecture(config)
    source = architecture.layer_prefix(last - 1)
    extra = {
        name.replace(source, architecture.layer_prefix(last)): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(source)
    }
    extra[f"{architecture.layer_prefix(last)}eh_proj.weight"] = torch.randn(32, 64)
    save_file({**tensors, **extra}, file, {"format": "pt"})
