"""Families whose layers have latent attention of two kinds, or delta rules in its place, as llama.cpp computes them.

Source: https://github.com/ggml-org/llama.cpp (`conversion/kimi_linear.py`, `conversion/dots3.py`,
`conversion/bailingmoe3.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from torch import Tensor

from moetool.format.gguf.changes import Change, Config, changed, nearest, whole_numbers
from moetool.format.gguf.delta_rules import KDA_MODULES, KDA_NAMES, decay, logarithm
from moetool.format.gguf.family import GgufFamily, beside, without_experts
from moetool.format.gguf.latent import LATENT, LATENT_COUNTS, LATENT_NAMES
from moetool.format.gguf.routing import (
    FIXED_EPSILON,
    IF_RENORMALIZED,
    INDEXER_COUNTS,
    RENORMALIZED,
    ROUTED_AS_DEEPSEEK,
    SCALED,
    UNBIASED,
    other_indexer,
    other_scores,
    told_epsilon,
)
from moetool.format.gguf.words import EMBEDDINGS, halved, interleaved, with_first

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NEARLY_FIXED = 1e-5  # hardly differs from `FIXED_EPSILON` in the squared norm of queries and keys of delta rules
# Entries of published configs of Ling 3.0 that bound activations of each layer's experts.
_LIMITS, _LIMITS_OF_SHARED = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"
# Entries that layers of dots3 with a window may have of their own.
_OF_WINDOWS = {
    "num_attention_heads",
    "num_key_value_heads",
    "kv_lora_rank",
    "head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
}


def _other_delta_rule(config: "PreTrainedConfig") -> str | None:
    if config.linear_num_heads != config.num_attention_heads:
        return (
            "it has as many heads in layers with delta rules as in those with attention, not "
            f"{config.linear_num_heads} and {config.num_attention_heads}"
        )
    if config.rms_norm_eps > _NEARLY_FIXED:
        return (
            "it divides queries and keys x of delta rules by √(|x|² + rms_norm_eps), transformers by "
            f"√(|x|² + {FIXED_EPSILON:g}), whatever rms_norm_eps = {config.rms_norm_eps:g} says"
        )
    return None


def _kernels(name: str) -> Change:
    """Kernels `[channels, 1, width]` of a convolution, which llama.cpp's converter has as `[1, channels, 1, width]`."""
    return changed(name, lambda _, given: given, lambda _, given: given.reshape(-1, 1, given.shape[-1]))


_norms = told_epsilon(
    "llama.cpp adds {eps:g} (rms_norm_eps) to the squared norm of queries and keys of delta rules and to the mean "
    f"square of small vectors of attention, transformers {FIXED_EPSILON:g}: logits differ slightly."
)
_KIMI_LINEAR = replace(
    ROUTED_AS_DEEPSEEK,
    model_type="kimi_linear",
    architecture="kimi-linear",
    is_latent=True,
    is_lite_by_layers=False,
    varies_heads=True,
    kinds_by_heads=("linear_attention", "full_attention"),
    has_shared=False,
    may_tie=False,
    experts_key="num_experts",
    names={
        **LATENT_NAMES,
        **beside("block_sparse_moe.shared_experts"),
        **KDA_NAMES,
    },
    modules={**KDA_MODULES, "block_sparse_moe.": "mlp."},
    dense={**without_experts("block_sparse_moe"), **without_experts("mlp")},
    changes={
        **LATENT,
        **{f"self_attn.{one}_conv1d.weight": _kernels(f"ssm_conv1d_{one}.weight") for one in ("q", "k", "v")},
        "self_attn.A_log": changed("ssm_a", decay, lambda config, given: logarithm(config, given).view(1, 1, -1, 1)),
    },
    counts={**LATENT_COUNTS, "linear_head_dim": "kda.head_dim", "linear_conv_kernel_dim": "ssm.conv_kernel"},
    flags={},
    computes={**RENORMALIZED, **UNBIASED, "q_lora_rank": (None,)},
    implied={"linear_num_heads": lambda config: config["num_attention_heads"]},
    objection=_other_delta_rule,
    remark=_norms,
    cutting="kimi-k2",
)


def _limits(key: str, config: "PreTrainedConfig") -> list[float] | None:
    """What bounds activations of each layer's experts; 0 where nothing does, and where there are none."""
    if not (own := getattr(config, key, None)):
        return None
    with_experts = [kind == "sparse" for kind in config.mlp_layer_types]
    return [float(limit or 0.0) * has for limit, has in zip_longest(own[: len(with_experts)], with_experts)]


def _other_bailing(config: "PreTrainedConfig") -> str | None:
    if (rank := getattr(config, "q_lora_rank", None)) is not None:
        return (
            f"it makes queries of a small vector (q_lora_rank = {rank}), which transformers, by which moetool "
            "computes, does not"
        )
    if config.kda_lower_bound >= 0:
        return f"its states decay from token to token (kda_lower_bound = {config.kda_lower_bound:g})"
    return other_scores(config) or _other_delta_rule(config)


def _of_bailing(config: "PreTrainedConfig") -> str | None:
    if not any(any(_limits(key, config) or ()) for key in (_LIMITS, _LIMITS_OF_SHARED)):
        return _norms(config)
    bounded = (
        f"config.json bounds activations of experts ({_LIMITS}, {_LIMITS_OF_SHARED}), and so does llama.cpp; "
        "transformers, by which moetool computes, does not: logits differ where a bound is reached."
    )
    return f"{norms} {bounded}" if (norms := _norms(config)) else bounded


_BAILING_HYBRID = replace(
    _KIMI_LINEAR,
    model_type="bailing_hybrid",
    architecture="bailingmoe3",
    has_shared=True,
    names={
        **{f"attention.{one}_proj.weight": f"attn_{one}.weight" for one in ("q", "k", "v")},
        **{f"attention.{one}.weight": "attn_output.weight" for one in ("o_proj", "dense")},
        **{f"attention.{one}_conv1d.weight": f"ssm_conv1d_{one}.weight" for one in ("q", "k", "v")},
        "attention.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
        "attention.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
        "attention.f_proj.weight": "ssm_f_a.weight",
        "attention.b_proj.weight": "ssm_beta.weight",
        "attention.dt_bias": "ssm_dt.bias",
        "attention.o_norm.weight": "ssm_norm.weight",
    },
    of_kinds={
        "linear_attention": {"attention.g_proj.weight": "ssm_g_a.weight"},
        "full_attention": {"attention.g_proj.weight": "attn_gate.weight"},
    },
    outside={"model.word_embeddings.weight": EMBEDDINGS},
    modules={
        "attention.dense": "self_attn.o_proj",
        "attention.f_proj": "self_attn.forget_gate.f_proj",
        "attention.": "self_attn.",
    },
    dense=without_experts("mlp"),
    changes={
        "attention.kv_b_proj.weight": LATENT["self_attn.kv_b_proj.weight"],
        "attention.A_log": changed(
            "ssm_a",
            lambda _, logarithm: logarithm.float().exp().unsqueeze(-1),
            lambda _, rate: rate.squeeze(-1).log(),
        ),
    },
    multipliers={**SCALED, "kda_lower_bound": "kda.gate_lower_bound"},
    flags={**IF_RENORMALIZED, "kda_safe_gate": "kda.safe_gate"},
    derived={
        "swiglu_clamp_exp": partial(_limits, _LIMITS),
        "swiglu_clamp_shexp": partial(_limits, _LIMITS_OF_SHARED),
    },
    computes={**UNBIASED, "kda_safe_gate": (True,)},
    objection=_other_bailing,
    remark=_of_bailing,
    cutting="bailingmoe2",
)


def _stretched(name: str) -> Change:
    """The norm of a small vector of a token, times √(hidden size / its width), which transformers multiplies after."""

    def scale(config: Config, weight: Tensor) -> float:
        return math.sqrt(whole_numbers(config, "hidden_size")[0] / len(weight))

    return changed(
        name,
        lambda config, weight: weight.float() * scale(config, weight),
        lambda config, weight: weight / scale(config, weight),
    )


def _rearranged(order: Callable[[Tensor, int], Tensor], heads: Sequence[str], config: Config, rows: Tensor) -> Tensor:
    [turned, count] = [*whole_numbers(config, "qk_rope_head_dim", *heads), 1][:2]
    return with_first(order, rows, count, turned)


def _of_indexer(name: str, *heads: str) -> Change:
    """Rows of an indexer's heads, where llama.cpp turns those that are half of the turned ones apart, and transformers
    neighbours. It gives places in a text, so that no gradient tells what its errors cost."""
    return changed(name, partial(_rearranged, halved, heads), partial(_rearranged, interleaved, heads))


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
MIXED: tuple[GgufFamily, ...] = (_KIMI_LINEAR, _BAILING_HYBRID, _DOTS3)
