"""Families whose layers read from several residual streams and write to all of them (hyper-connections), in GGUF.

Sources: https://arxiv.org/abs/2409.19606; https://github.com/ggml-org/llama.cpp (`conversion/hy_v4.py`,
`src/models/hy-v4.cpp`, `conversion/glm.py`, `src/models/glm5-next.cpp`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.format.gguf.changes import Change, Config, changed, nearest, whole_numbers
from moetool.format.gguf.delta_rules import KDA_CHANGES, KDA_MODULES, KDA_NAMES
from moetool.format.gguf.family import GgufFamily, beside, nothing
from moetool.format.gguf.latent import DEEPSEEK_V32
from moetool.format.gguf.routing import other_scores, own_indexers
from moetool.format.gguf.words import OWN_INDEXERS, SHARED_EXPERT, halved, interleaved

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_Order = Callable[[Tensor, int], Tensor]


def _head_of_queries(config: Config) -> int:
    return sum(whole_numbers(config, "qk_nope_head_dim", "qk_rope_head_dim"))


def _small_vector(config: Config) -> int:
    return sum(whole_numbers(config, "kv_lora_rank", "qk_rope_head_dim"))


def _head_of_indexer(config: Config) -> int:
    return sum(whole_numbers(config, "index_head_dim"))


def _neighbours(name: str, width: Callable[[Config], int], *, keeps_inputs: bool = True) -> Change:
    """Heads, so many rows each, whose last rows rotary embeddings turn: half a head apart in a checkpoint, neighbours
    in a file."""

    def ordered(order: _Order, config: Config, given: Tensor) -> Tensor:
        by_head = given.unflatten(0, (-1, width(config)))
        kept = width(config) - sum(whole_numbers(config, "qk_rope_head_dim"))
        turned = order(by_head[:, kept:].flatten(0, 1), len(by_head)).unflatten(0, (len(by_head), -1))
        return torch.cat([by_head[:, :kept], turned], dim=1).flatten(0, 1)

    there, back = partial(ordered, interleaved), partial(ordered, halved)
    return replace(changed(name, there, back), keeps_inputs=keeps_inputs)


def _of_indexer(name: str) -> Change:
    """Heads of an indexer, which gives places in a text and so no gradient: with the nearest codes of 8 bits."""
    return _neighbours(name, _head_of_indexer, keeps_inputs=False)


def _other_limit(config: "PreTrainedConfig") -> str | None:
    if config.swiglu_limit <= 0:
        return f"it bounds nothing for swiglu_limit = {config.swiglu_limit}, by which transformers bounds all the same"
    return None


def _other_hy_v4(config: "PreTrainedConfig") -> str | None:
    if config.indexer_types[0] != "full":
        return "its first layer points out its own tokens (indexer_types)"
    if config.index_head_dim <= config.qk_rope_head_dim:
        return "what points out tokens has wider heads (index_head_dim) than what is turned of them (qk_rope_head_dim)"
    return other_scores(config) or _other_limit(config)


_STREAMS = {"attn": "attn", "mlp": "ffn"}  # what reads them: in a checkpoint and in a file
_PARTS = ("fn", "base", "scale")
_HY_V4 = replace(
    DEEPSEEK_V32,
    model_type="hy_v4",
    architecture="hy_v4",
    needs_head=True,
    has_shared=False,
    names={
        **{name: own for name, own in DEEPSEEK_V32.names.items() if ".indexer." not in name},
        "self_attn.learnable_sink_param": "attn_sinks.weight",
        "self_attn.linear_gate.weight": "attn_gate.weight",
        **{
            f"{path}.hc_{part}": f"hc_{own}_{part}.weight"
            for name, own in _STREAMS.items()
            for path in (f"hc_{name}_layer.hc_pre", f"hc_pre.hc_{name}_layer")
            for part in _PARTS
        },
        **beside("mlp.shared_experts"),
        "mlp.shared_experts.linear_gate.weight": SHARED_EXPERT["gate"],
    },
    outside={
        f"model.{path}.hc_head_{part}": f"output_hc_{part}.weight"
        for path in ("hc_head", "hc_pre.hc_head", "hc_head.hc_pre")
        for part in _PARTS
    },
    modules={f"{path}.linear_gate": f"{path}.gate_proj" for path in ("self_attn", "mlp", "mlp.shared_experts")},
    dense={**DEEPSEEK_V32.dense, "mlp.linear_gate.weight": "ffn_gate.weight"},
    changes={
        **DEEPSEEK_V32.changes,
        "self_attn.q_b_proj.weight": _neighbours("attn_q_b.weight", _head_of_queries),
        "self_attn.kv_a_proj_with_mqa.weight": _neighbours("attn_kv_a_mqa.weight", _small_vector),
        "self_attn.indexer.wq_b.weight": _of_indexer("indexer.attn_q_b.weight"),
        "self_attn.indexer.wk.weight": _of_indexer("indexer.attn_k.weight"),
        **{f"self_attn.indexer.k_norm.{part}": _of_indexer(f"indexer.k_norm.{part}") for part in ("weight", "bias")},
    },
    counts={**DEEPSEEK_V32.counts, "hc_mult": "hyper_connection.count"},
    multipliers={
        **DEEPSEEK_V32.multipliers,
        "hc_eps": "hyper_connection.epsilon",
        "hc_magnitude": "hyper_connection.magnitude",
        "swiglu_limit": "swiglu_clamp_exp",
    },
    derived={OWN_INDEXERS: own_indexers},
    objection=_other_hy_v4,
    cutting="hy_v4",
)
# Whose rotary embeddings turn neighbours in a checkpoint, too.
_HY_V4_VL = replace(
    _HY_V4,
    model_type="hy_v4_vl_text",
    names={**DEEPSEEK_V32.names, **_HY_V4.names},
    changes=DEEPSEEK_V32.changes,
    remark=nothing,
)


def _heads_of_keys(config: "PreTrainedConfig") -> list[int]:
    """Of each layer: none where it carries a state."""
    return [0 if kind == "linear_attention" else 1 for kind in config.layer_types]


def _other_glm5_next(config: "PreTrainedConfig") -> str | None:
    if config.linear_num_heads != config.num_attention_heads:
        return "layers with a state have as many heads as those with attention (linear_num_heads)"
    if config.hc_mult != 4:
        return "it has four residual streams (hc_mult)"
    if config.index_kpool < 2:
        return "two tokens at least are pointed out together (index_kpool)"
    if not config.index_kpool_always_select_tail:
        return "the first tokens of a text attend to something (index_kpool_always_select_tail)"
    return _other_limit(config)


_GLM5_NEXT = replace(
    DEEPSEEK_V32,
    model_type="glm5_next_text",
    architecture="glm5-next",
    needs_head=True,
    has_shared=False,
    remark=nothing,
    names={
        **DEEPSEEK_V32.names,
        **beside("mlp.shared_experts"),
        **KDA_NAMES,
        "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
        **{f"hc_{own}_{part}": f"hc_{own}_{part}.weight" for own in _STREAMS.values() for part in _PARTS},
    },
    modules=KDA_MODULES,
    changes={
        **DEEPSEEK_V32.changes,
        **KDA_CHANGES,
        "self_attn.indexer.index_kpool_compress_gate": nearest("indexer_compressor_gate.weight"),
    },
    counts={
        **DEEPSEEK_V32.counts,
        "index_kpool": "attention.indexer.kpool",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_head_dim": "kda.head_dim",
        "hc_mult": "hyper_connection.count",
        "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    },
    multipliers={
        **DEEPSEEK_V32.multipliers,
        "hc_eps": "hyper_connection.epsilon",
        "linear_lower_bound": "kda.gate_lower_bound",
        "swiglu_limit": "swiglu_clamp_exp",
    },
    flags={**DEEPSEEK_V32.flags, "index_kpool_always_select_tail": "attention.indexer.kpool_select_tail"},
    fixed={**DEEPSEEK_V32.fixed, "attention.layer_norm_epsilon": 1e-6},
    derived={OWN_INDEXERS: own_indexers, "attention.head_count_kv": _heads_of_keys},
    objection=_other_glm5_next,
    cutting="glm4",
)
OF_STREAMS: tuple[GgufFamily, ...] = (_HY_V4, _HY_V4_VL, _GLM5_NEXT)
