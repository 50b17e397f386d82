"""Families whose layers read from several residual streams and write to all of them (hyper-connections), in GGUF.

Sources: https://arxiv.org/abs/2409.19606; https://github.com/ggml-org/llama.cpp (`conversion/hy_v4.py`,
`src/models/hy-v4.cpp`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.format.gguf.family import Change, Config, GgufFamily, beside
from moetool.format.gguf.latent import DEEPSEEK_V32
from moetool.format.gguf.words import SHARED_EXPERT, halved, interleaved

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_Order = Callable[[Tensor, int], Tensor]


def _size(config: Config, key: str) -> int:
    found = config[key]
    assert isinstance(found, int)
    return found


def _head_of_queries(config: Config) -> int:
    return _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim")


def _small_vector(config: Config) -> int:
    return _size(config, "kv_lora_rank") + _size(config, "qk_rope_head_dim")


def _head_of_indexer(config: Config) -> int:
    return _size(config, "index_head_dim")


def _neighbours(name: str, width: Callable[[Config], int]) -> Change:
    """Heads, so many rows each, whose last rows rotary embeddings turn: half a head apart in a checkpoint, neighbours
    in a file."""

    def ordered(config: Config, given: Tensor, order: _Order) -> Tensor:
        by_head = given.unflatten(0, (-1, width(config)))
        kept = width(config) - _size(config, "qk_rope_head_dim")
        turned = order(by_head[:, kept:].flatten(0, 1), len(by_head)).unflatten(0, (len(by_head), -1))
        return torch.cat([by_head[:, :kept], turned], dim=1).flatten(0, 1)

    return Change(
        (name,),
        lambda config, given: [ordered(config, given, interleaved)],
        lambda config, given: ordered(config, given[0], halved),
        keeps_inputs=True,
    )


def _own_indexers(config: "PreTrainedConfig") -> list[bool]:
    """Whether each layer points out the tokens that it looks closer at; the others take those of the last that does."""
    return [kind == "full" for kind in config.indexer_types]


def _other_hy_v4(config: "PreTrainedConfig") -> str | None:
    if config.swiglu_limit <= 0:
        return f"it bounds nothing for swiglu_limit = {config.swiglu_limit}, by which transformers bounds all the same"
    if config.indexer_types[0] != "full":
        return "its first layer points out its own tokens (indexer_types)"
    if config.index_head_dim <= config.qk_rope_head_dim:
        return "what points out tokens has wider heads (index_head_dim) than what is turned of them (qk_rope_head_dim)"
    if (kind := config.rope_parameters.get("rope_type", "default")) != "default":
        return f"it does not multiply the scores of attention as rotary embeddings of the kind '{kind}' may ask for"
    return None


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
        "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
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
        for path in ("hc_head", "hc_pre.hc_head")
        for part in _PARTS
    },
    modules={f"{path}.linear_gate": f"{path}.gate_proj" for path in ("self_attn", "mlp", "mlp.shared_experts")},
    dense={**DEEPSEEK_V32.dense, "mlp.linear_gate.weight": "ffn_gate.weight"},
    changes={
        **DEEPSEEK_V32.changes,
        "self_attn.q_b_proj.weight": _neighbours("attn_q_b.weight", _head_of_queries),
        "self_attn.kv_a_proj_with_mqa.weight": _neighbours("attn_kv_a_mqa.weight", _small_vector),
        "self_attn.indexer.wq_b.weight": _neighbours("indexer.attn_q_b.weight", _head_of_indexer),
        "self_attn.indexer.wk.weight": _neighbours("indexer.attn_k.weight", _head_of_indexer),
        **{
            f"self_attn.indexer.k_norm.{part}": replace(
                _neighbours(f"indexer.k_norm.{part}", _head_of_indexer), keeps_inputs=False
            )
            for part in ("weight", "bias")
        },
    },
    counts={**DEEPSEEK_V32.counts, "hc_mult": "hyper_connection.count"},
    multipliers={
        **DEEPSEEK_V32.multipliers,
        "hc_eps": "hyper_connection.epsilon",
        "hc_magnitude": "hyper_connection.magnitude",
        "swiglu_limit": "swiglu_clamp_exp",
    },
    derived={"attention.indexer.types": _own_indexers},
    objection=_other_hy_v4,
    cutting="hy_v4",
)
OF_STREAMS: tuple[GgufFamily, ...] = (_HY_V4,)
