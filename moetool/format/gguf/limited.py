"""Families whose experts have limits on their gates, as llama.cpp computes them.

Sources: https://github.com/ggml-org/llama.cpp (`conversion/step3.py`, `conversion/minimax.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moetool.format.gguf.changes import gate_and_up, nearest, norms_plus_one, plus_one
from moetool.format.gguf.family import GgufFamily, beside, without_experts
from moetool.format.gguf.routing import SCALE, SCALED, SIGMOID_RENORMALIZED, UNBIASED
from moetool.format.gguf.words import EXPERT_WIDTH, SHARED_COUNT, SHARED_EXPERT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NORMS_PLUS_ONE = norms_plus_one("ffn_norm.weight")
_INDEXER: Mapping[str, str] = {"q_proj": "indexer.q_proj", "k_proj": "indexer.k_proj"}
_INDEXER_NORMS: Mapping[str, str] = {"q_norm": "indexer.q_norm", "k_norm": "indexer.k_norm"}


def _other_step(config: "PreTrainedConfig") -> str | None:
    if config.query_pre_attn_scalar != config.head_dim:
        return "it divides scores by the root of a head's width (query_pre_attn_scalar)"
    return None


def _other_minimax(config: "PreTrainedConfig") -> str | None:
    turned = int(config.head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))
    kinds = zip(config.layer_types, config.mlp_layer_types, strict=True)
    if any((attention == "minimax_m3_sparse") != (mlp == "sparse") for attention, mlp in kinds):
        return "its attention is sparse in just the layers that have experts (layer_types, mlp_layer_types)"
    if config.index_n_heads != config.num_key_value_heads:
        return "its indexer has as many heads as there are of keys (index_n_heads)"
    if config.index_local_blocks > config.index_topk_blocks:
        return "blocks before a token are among those that are chosen (index_local_blocks, index_topk_blocks)"
    if turned > config.index_head_dim:
        return "rotary embeddings turn as many channels of the indexer's heads (index_head_dim)"
    if turned != min(config.rotary_dim, config.head_dim):
        return (
            f"rotary_dim says that rotary embeddings turn {config.rotary_dim} channels of a head, and transformers, by "
            f"which moetool computes, turns {turned} (partial_rotary_factor)"
        )
    if not config.shared_intermediate_size or config.shared_intermediate_size % config.intermediate_size:
        return "its shared experts are as wide as some of the others together (shared_intermediate_size)"
    return None


def _blocks_want_flash_attention(_: "PreTrainedConfig") -> str:
    return (
        "llama.cpp attends to chosen blocks of a text, as this model does, with flash attention alone, which is its "
        "default; without, to all of a text."
    )


_MINIMAX_M3 = GgufFamily(
    "minimax_m3_vl_text",
    "minimax-m3",
    is_moe=True,
    leads_dense=True,
    needs_head=True,
    is_partial=True,
    width_key=EXPERT_WIDTH,
    dense_width="dense_intermediate_size",
    names={"mlp.shared_experts.down_proj.weight": SHARED_EXPERT["down"]},
    dense={"mlp.down_proj.weight": "ffn_down.weight"},
    changes={
        **_NORMS_PLUS_ONE,
        **{f"self_attn.indexer.{name}.weight": nearest(f"{own}.weight") for name, own in _INDEXER.items()},
        **{f"self_attn.indexer.{name}.weight": plus_one(f"{own}.weight") for name, own in _INDEXER_NORMS.items()},
        "mlp.gate_up_proj.weight": gate_and_up("ffn_gate.weight", "ffn_up.weight"),
        "mlp.shared_experts.gate_up_proj.weight": gate_and_up(SHARED_EXPERT["gate"], SHARED_EXPERT["up"]),
    },
    counts={
        "index_n_heads": "attention.indexer.head_count",
        "index_head_dim": "attention.indexer.key_length",
        "index_topk_blocks": "attention.indexer.top_k",
        "index_block_size": "attention.indexer.block_size",
        "index_local_blocks": "attention.indexer.local_blocks",
    },
    multipliers=SCALED,
    derived={SHARED_COUNT: lambda config: int(config.shared_intermediate_size // config.intermediate_size)},
    fixed=SIGMOID_RENORMALIZED,
    computes={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    objection=_other_minimax,
    remark=_blocks_want_flash_attention,
    cutting="minimax-m2",
)
_SHARED_OF_HUB, _JOINED = "block_sparse_moe.shared_experts", "gate_up_proj"
# As the hub has it, in a model that sees: gate and up are apart there, and other modules have other names.
MINIMAX_M3_OF_HUB = replace(
    _MINIMAX_M3,
    names=beside(_SHARED_OF_HUB),
    dense=without_experts("mlp"),
    changes={
        **_NORMS_PLUS_ONE,
        **{f"self_attn.index_{name}.weight": nearest(f"{own}.weight") for name, own in _INDEXER.items()},
        **{f"self_attn.index_{name}.weight": plus_one(f"{own}.weight") for name, own in _INDEXER_NORMS.items()},
    },
    modules={
        **{f"mlp.{role}_proj": f"mlp.{_JOINED}" for role in ("gate", "up")},
        **{f"{_SHARED_OF_HUB}.{role}_proj": f"mlp.shared_experts.{_JOINED}" for role in ("gate", "up")},
        f"{_SHARED_OF_HUB}.": "mlp.shared_experts.",
    },
)
OF_LIMITED: tuple[GgufFamily, ...] = (
    GgufFamily(
        "step3p5",
        "step35",
        is_moe=True,
        mixes_layers=True,
        needs_head=True,
        is_partial=True,
        slows_rope=True,
        turns_shares=True,
        doubles_turned=True,
        experts_key="n_routed_experts",
        width_key=EXPERT_WIDTH,
        names={"self_attn.g_proj.weight": "attn_gate.weight", **beside("share_expert")},
        modules={"share_expert.": "mlp.shared_experts."},
        changes=_NORMS_PLUS_ONE,
        multipliers={"moe_router_scaling_factor": SCALE},
        of_layers={"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"},
        fixed=SIGMOID_RENORMALIZED,
        computes={
            **UNBIASED,
            "gating": (True, "per-head"),
            "mlp_bias": (False,),
            "use_bidirectional_attention": (False, None),
        },
        objection=_other_step,
        window_period=0,
        needs_windows=True,
    ),
    _MINIMAX_M3,
)
