"""Latent attention (DeepSeek's MLA) in GGUF: the matrix from a token's small vector to keys and values, taken apart.

llama.cpp multiplies queries by the keys' half, transposed, so that only the small vector is cached.
Source: https://github.com/ggml-org/llama.cpp, `conversion/deepseek.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moetool.format.gguf.changes import Change, Config, nearest, whole_numbers
from moetool.format.gguf.family import GgufFamily
from moetool.format.gguf.routing import (
    FIXED_EPSILON,
    INDEXER_COUNTS,
    N_SHARED,
    ROUTED_AS_DEEPSEEK,
    SOFTMAX,
    UNBIASED,
    WEIGHTS_NORM,
    other_indexer,
    own_indexers,
    told_epsilon,
)
from moetool.format.gguf.words import OWN_INDEXERS


def _apart(config: Config, matrix: Tensor) -> list[Tensor]:
    """`[heads · (keys + values), rank]` as `[heads, rank, keys]` and `[heads, values, rank]`, by channels of a head's
    keys (without those that rotary embeddings turn) and of its values."""
    keys, values = whole_numbers(config, "qk_nope_head_dim", "v_head_dim")
    by_head = matrix.reshape(-1, keys + values, matrix.shape[-1])
    return [by_head[:, :keys].transpose(1, 2), by_head[:, keys:]]


def _together(_: Config, parts: Sequence[Tensor]) -> Tensor:
    """Join keys and values of all heads, as `_apart` splits them, to one matrix `[heads · (keys + values), rank]`."""
    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


LATENT: Mapping[str, Change] = {
    "self_attn.kv_b_proj.weight": Change(("attn_k_b.weight", "attn_v_b.weight"), _apart, _together)
}
LATENT_NAMES: Mapping[str, str] = {
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
}
LATENT_COUNTS: Mapping[str, str] = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "v_head_dim": "attention.value_length_mla",
    **N_SHARED,
}


def _choice(config: Config) -> object:
    """How DeepSeek-V2 chooses experts: among all, or among those of the groups with the best ones."""
    [groups] = whole_numbers(config, "n_group")
    return "greedy" if groups == 1 else "group_limited_greedy"


_DEEPSEEK_V3 = replace(
    ROUTED_AS_DEEPSEEK,
    model_type="deepseek_v3",
    architecture="deepseek2",
    is_latent=True,
    names=LATENT_NAMES,
    changes=LATENT,
    former={"attn_kv_b.weight": "self_attn.kv_b_proj.weight"},
    counts=LATENT_COUNTS,
    computes={"rope_interleave": (True,), **UNBIASED},
    remark=told_epsilon(
        "llama.cpp norms the small vectors of attention with rms_norm_eps = {eps}, transformers with "
        f"{FIXED_EPSILON:g}: logits differ slightly."
    ),
    cutting="deepseek-v3",
)
# Its attention sees some tokens only, which a small attention of its own (the indexer) chooses.
DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3,
    model_type="deepseek_v32",
    architecture="deepseek32",
    is_lite_by_layers=False,
    names={
        **LATENT_NAMES,
        **{f"self_attn.indexer.k_norm.{part}": f"indexer.k_norm.{part}" for part in ("weight", "bias")},
    },
    changes={
        **LATENT,
        "self_attn.indexer.wq_b.weight": nearest("indexer.attn_q_b.weight"),
        "self_attn.indexer.wk.weight": nearest("indexer.attn_k.weight"),
        "self_attn.indexer.weights_proj.weight": nearest("indexer.proj.weight"),
    },
    counts={**LATENT_COUNTS, **INDEXER_COUNTS},
    computes=UNBIASED,
    objection=other_indexer,
)
OF_LATENT: tuple[GgufFamily, ...] = (
    # First, since early files of it do not say how it weighs experts.
    replace(
        _DEEPSEEK_V3,
        model_type="deepseek_v2",
        groups_experts=False,
        flags={},
        fixed={**SOFTMAX, WEIGHTS_NORM: False},
        computes=UNBIASED,
        implied={"topk_method": _choice},
        cutting="deepseek-llm",
    ),
    _DEEPSEEK_V3,
    replace(_DEEPSEEK_V3, model_type="glm4_moe_lite", cutting="glm4"),
    DEEPSEEK_V32,
    replace(
        DEEPSEEK_V32,
        model_type="glm_moe_dsa",
        architecture="glm-dsa",
        weighs_scores=False,
        derived={OWN_INDEXERS: own_indexers},
        cutting="glm4",
    ),
    replace(_DEEPSEEK_V3, model_type="mistral4", architecture="mistral4", fixed=SOFTMAX, cutting="tekken"),
)
