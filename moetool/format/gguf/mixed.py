"""Families whose layers have latent attention of two kinds, or delta rules in its place, as llama.cpp computes them.

Source: https://github.com/ggml-org/llama.cpp (`conversion/kimi_linear.py`, `conversion/dots3.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.format.gguf.family import Change, Config, GgufFamily, beside, nearest, whole_numbers, without_experts
from moetool.format.gguf.latent import LATENT, LATENT_COUNTS, LATENT_NAMES
from moetool.format.gguf.recurrent import changed, decay, logarithm
from moetool.format.gguf.routing import INDEXER_COUNTS, RENORMALIZED, ROUTED_AS_DEEPSEEK, UNBIASED, other_indexer
from moetool.format.gguf.words import halved, interleaved

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What is added to the squared norm of queries and keys of delta rules, and what hardly differs from that.
_UNDER_ROOT, _NEARLY_UNDER_ROOT = 1e-6, 1e-5
# Entries that layers of dots3 with a window may have of their own.
_OF_WINDOWS = {
    "num_attention_heads",
    "num_key_value_heads",
    "kv_lora_rank",
    "head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
}


def _other_kimi(config: "PreTrainedConfig") -> str | None:
    if config.linear_num_heads != config.num_attention_heads:
        return (
            "it has as many heads in layers with delta rules as in those with attention, not "
            f"{config.linear_num_heads} and {config.num_attention_heads}"
        )
    if config.rms_norm_eps > _NEARLY_UNDER_ROOT:
        return (
            "it divides queries and keys x of delta rules by √(|x|² + rms_norm_eps), transformers by "
            f"√(|x|² + {_UNDER_ROOT:g}), whatever rms_norm_eps = {config.rms_norm_eps:g} says"
        )
    return None


def _norm_of_keys(config: "PreTrainedConfig") -> str | None:
    if config.rms_norm_eps == _UNDER_ROOT:
        return None
    return (
        f"llama.cpp adds {config.rms_norm_eps:g} (rms_norm_eps) to the squared norm of queries and keys of delta "
        f"rules, transformers {_UNDER_ROOT:g}: logits differ slightly."
    )


_KIMI_LINEAR = replace(
    ROUTED_AS_DEEPSEEK,
    model_type="kimi_linear",
    architecture="kimi-linear",
    is_latent=True,
    is_lite_by_layers=False,
    varies_heads=True,
    has_shared=False,
    may_tie=False,
    experts_key="num_experts",
    names={
        **LATENT_NAMES,
        **beside("block_sparse_moe.shared_experts"),
        **{f"self_attn.{one}_conv1d.weight": f"ssm_conv1d_{one}.weight" for one in ("q", "k", "v")},
        **{f"self_attn.{one}_proj.weight": f"ssm_{one}.weight" for one in ("f_a", "f_b", "g_a", "g_b")},
        "self_attn.b_proj.weight": "ssm_beta.weight",
        "self_attn.dt_bias": "ssm_dt.bias",
        "self_attn.o_norm.weight": "ssm_norm.weight",
    },
    modules={"self_attn.f_": "self_attn.forget_gate.f_", "block_sparse_moe.": "mlp."},
    dense={**without_experts("mlp"), **without_experts("block_sparse_moe")},
    changes={**LATENT, "self_attn.A_log": changed("ssm_a", decay, logarithm)},
    counts={**LATENT_COUNTS, "linear_head_dim": "kda.head_dim", "linear_conv_kernel_dim": "ssm.conv_kernel"},
    flags={},
    computes={**RENORMALIZED, **UNBIASED, "q_lora_rank": (None,)},
    objection=_other_kimi,
    remark=_norm_of_keys,
    cutting="kimi-k2",
)


def _stretched(name: str) -> Change:
    """The norm of a small vector of a token, times √(hidden size / its width), which transformers multiplies after."""

    def scale(config: Config, weight: Tensor) -> float:
        return math.sqrt(whole_numbers(config, "hidden_size")[0] / len(weight))

    return Change(
        (name,),
        lambda config, weight: [weight.float() * scale(config, weight)],
        lambda config, parts: parts[0] / scale(config, parts[0]),
    )


def _rearranged(order: Callable[[Tensor, int], Tensor], heads: Sequence[str], config: Config, rows: Tensor) -> Tensor:
    [turned, count] = [*whole_numbers(config, "qk_rope_head_dim", *heads), 1][:2]
    by_head = rows.unflatten(0, (count, -1))
    first = order(by_head[:, :turned].flatten(0, 1), count).unflatten(0, (count, -1))
    return torch.cat([first, by_head[:, turned:]], dim=1).flatten(0, 1)


def _of_indexer(name: str, *heads: str) -> Change:
    """Rows of an indexer's heads, where llama.cpp turns those that are half of the turned ones apart, and transformers
    neighbours. It gives places in a text, so that no gradient tells what its errors cost."""
    there, back = partial(_rearranged, halved, heads), partial(_rearranged, interleaved, heads)
    return Change((name,), lambda config, rows: [there(config, rows)], lambda config, parts: back(config, parts[0]))


def _other_dots(config: "PreTrainedConfig") -> str | None:
    if set(config.layer_types) != {"indexed_attention", "sliding_attention"}:
        return "it has layers with an indexer and layers with a window, and no others (layer_types)"
    whole, own = config.to_dict(), [layer.to_dict() for layer in config.per_layer_config]
    differing = [{key: value for key, value in layer.items() if key in whole and whole[key] != value} for layer in own]
    windows = [other for other, kind in zip(differing, config.layer_types, strict=True) if kind == "sliding_attention"]
    if any(other for other in differing if other not in windows) or any(other != windows[0] for other in windows):
        return "all layers with a window are alike, and all others (per_layer_config)"
    if (key := next((key for key in windows[0] if key not in _OF_WINDOWS), None)) is not None:
        return f"{key} is the same in all layers"
    if config.shared_experts_intermediate_size != config.moe_intermediate_size:
        return "a shared expert is as wide as the others (shared_experts_intermediate_size)"
    if (reason := other_indexer(config)) is not None:
        return reason
    if {rope.get("rope_type") for rope in config.rope_parameters.values()} != {"default"}:
        return "it turns all layers alike for long texts (rope_parameters), and multiplies no scores"
    return None


_DOTS3 = replace(
    ROUTED_AS_DEEPSEEK,
    model_type="dots3_note_text",
    architecture="dots3note",
    is_latent=True,
    is_lite_by_layers=False,
    window_period=0,
    needs_windows=True,
    is_indexed=True,
    names={
        **LATENT_NAMES,
        "self_attn.k_rope_only_layernorm.weight": "attn_k_norm.weight",
        "self_attn.g_proj.weight": "attn_gate.weight",
    },
    changes={
        **LATENT,
        "self_attn.q_a_layernorm.weight": _stretched("attn_q_a_norm.weight"),
        "self_attn.kv_a_layernorm.weight": _stretched("attn_kv_a_norm.weight"),
        "self_attn.indexer.wq_b.weight": _of_indexer("indexer.attn_q_b.weight", "index_n_heads"),
        "self_attn.indexer.wk.weight": _of_indexer("indexer.attn_k.weight"),
        "self_attn.indexer.weights_proj.weight": nearest("indexer.proj.weight"),
        **{f"self_attn.indexer.k_norm.{part}": _of_indexer(f"indexer.k_norm.{part}") for part in ("weight", "bias")},
    },
    counts={**LATENT_COUNTS, **INDEXER_COUNTS},
    computes={**UNBIASED, "mlp_bias": (False,)},
    objection=_other_dots,
)
MIXED: tuple[GgufFamily, ...] = (_KIMI_LINEAR, _DOTS3)
