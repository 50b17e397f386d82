"""DeepSeek-V4, as llama.cpp computes it: attention to a window and to a compressed text, streams that are mixed.

Source: https://github.com/ggml-org/llama.cpp (`conversion/deepseek.py`, `src/models/deepseek4.cpp`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moetool.architectures.shape import ROLES
from moetool.format.gguf.changes import nearest
from moetool.format.gguf.family import GgufFamily
from moetool.format.gguf.routing import INDEXER_COUNTS, N_SHARED, SCALED, SIGMOID_RENORMALIZED, other_indexer
from moetool.format.gguf.words import EXPERT_WIDTH, GATING, HEAD, SHARED_EXPERT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_SQUARE_ROOT_OF_SOFTPLUS = 4
_BY_ROLE = {"gate": "w1", "up": "w3", "down": "w2"}


def _hash_layers(config: "PreTrainedConfig") -> int:
    return sum(kind == "hash_moe" for kind in config.mlp_layer_types)


def _limits(config: "PreTrainedConfig") -> list[float]:
    return [float(config.swiglu_limit)] * config.num_hidden_layers


def _other_deepseek_v4(config: "PreTrainedConfig") -> str | None:
    count, kinds = _hash_layers(config), set(config.layer_types)
    if any(kind != "hash_moe" for kind in config.mlp_layer_types[:count]):
        return "layers whose experts are looked up by token come first (mlp_layer_types)"
    if "compressed_sparse_attention" not in kinds:
        return "some of its layers choose among what 4 tokens each are compressed into (layer_types); it runs no others"
    if any(_RATIOS[kind] != rate for kind, rate in config.compress_rates.items() if kind in kinds):
        return "it compresses 4 or 128 tokens into one (compress_rates)"
    if (reason := other_indexer(config)) is not None:
        return reason
    if config.swiglu_limit <= 0:
        return "a limit of 0 is none (swiglu_limit)"
    main, compress = (config.rope_parameters[kind] for kind in ("main", "compress"))
    if main["rope_type"] != "default":
        return "rotary embeddings of layers that compress nothing are not stretched (rope_parameters)"
    if (main["rope_theta"], compress["rope_theta"]) != (config.rope_theta, config.compress_rope_theta):
        return "rotary embeddings have the bases rope_theta and compress_rope_theta, whatever rope_parameters says"
    if main.get("partial_rotary_factor") != compress.get("partial_rotary_factor"):
        return "rotary embeddings turn the same share of a head in all layers (partial_rotary_factor)"
    if compress.get("rope_type") == "yarn" and compress.get("attention_factor") != 1:
        return "rotary embeddings are multiplied by nothing (attention_factor)"
    return None


_COMPRESSED: Mapping[str, str] = {"wkv.weight": "kv.weight", "wgate.weight": "gate.weight"}
_DEEPSEEK_V4 = GgufFamily(
    "deepseek_v4",
    "deepseek4",
    is_moe=True,
    is_partial=True,
    sees_windows=True,
    may_tie=False,
    experts_key="n_routed_experts",
    width_key=EXPERT_WIDTH,
    names={
        "attn_norm.weight": "attn_norm.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        "attn.attn_sink": "attn_sinks.weight",
        "attn.wq_a.weight": "attn_q_a.weight",
        "attn.q_norm.weight": "attn_q_a_norm.weight",
        "attn.wq_b.weight": "attn_q_b.weight",
        "attn.wkv.weight": "attn_kv.weight",
        **dict.fromkeys(("attn.kv_norm.weight", "attn.norm.weight"), "attn_kv_a_norm.weight"),
        "attn.wo_b.weight": "attn_output_b.weight",
        **{f"attn.compressor.{name}": f"attn_compressor_{own}" for name, own in _COMPRESSED.items()},
        **{
            f"attn.{module}compressor.{name}": f"{own}_compressor_{part}.weight"
            for module, own in {"": "attn", "indexer.": "indexer"}.items()
            for name, part in {"ape": "ape", "norm.weight": "norm"}.items()
        },
        **{
            f"hc_{block}_{part}": f"hc_{block}_{part}.weight"
            for block in ("attn", "ffn")
            for part in ("fn", "base", "scale")
        },
        **{f"ffn.shared_experts.{_BY_ROLE[role]}.weight": SHARED_EXPERT[role] for role in ROLES},
        "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
        "ffn.gate.bias": "exp_probs_b.bias",
    },
    outside={
        "head.weight": HEAD,
        **{f"model.hc_head.hc_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
    },
    modules={
        "attn.wq_a": "self_attn.q_a_proj",
        "attn.wq_b": "self_attn.q_b_proj",
        "attn.wkv": "self_attn.kv_proj",
        "attn.wo_b": "self_attn.o_b_proj",
        "attn.compressor.wkv": "self_attn.compressor.kv_proj",
        "attn.compressor.wgate": "self_attn.compressor.gate_proj",
        **{f"ffn.shared_experts.{_BY_ROLE[role]}": f"mlp.shared_experts.{role}_proj" for role in ROLES},
    },
    changes={
        "attn.wo_a.weight": nearest("attn_output_a.weight"),
        "attn.indexer.wq_b.weight": nearest("indexer.attn_q_b.weight"),
        "attn.indexer.weights_proj.weight": nearest("indexer.proj.weight"),
        **{
            f"attn.indexer.compressor.{name}": nearest(f"indexer_compressor_{own}") for name, own in _COMPRESSED.items()
        },
    },
    counts={
        **N_SHARED,
        "sliding_window": "attention.sliding_window",
        "q_lora_rank": "attention.q_lora_rank",
        "o_groups": "attention.output_group_count",
        "o_lora_rank": "attention.output_lora_rank",
        **INDEXER_COUNTS,
        "hc_mult": "hyper_connection.count",
        "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    },
    multipliers={
        **SCALED,
        "compress_rope_theta": "attention.compress_rope_freq_base",
        "hc_eps": "hyper_connection.epsilon",
    },
    products={"embedding_length_out": ("hidden_size", "hc_mult")},
    derived={
        "attention.compress_ratios": lambda config: [_RATIOS[kind] for kind in config.layer_types],
        "hash_layer_count": _hash_layers,
        "swiglu_clamp_exp": _limits,
        "swiglu_clamp_shexp": _limits,
    },
    fixed={**SIGMOID_RENORMALIZED, GATING: _SQUARE_ROOT_OF_SOFTPLUS},
    computes={
        "scoring_func": ("sqrtsoftplus",),
        "num_key_value_heads": (1,),
        "n_shared_experts": (1,),
        "hc_mult": (4,),
        "tie_word_embeddings": (False,),
        "mlp_bias": (False,),
    },
    objection=_other_deepseek_v4,
    cutting="deepseek-v3",
)
OF_COMPRESSED: tuple[GgufFamily, ...] = (_DEEPSEEK_V4,)
