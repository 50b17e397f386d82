"""Qwen4-Exp in GGUF: residual streams, gated delta rules, embeddings of n-grams, attention to some blocks of a text.

A small attention (the indexer) chooses the blocks.
Sources: https://github.com/ggml-org/llama.cpp (`conversion/qwen4exp.py`, `src/models/qwen4exp.cpp`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.format.gguf.changes import Change, Config, plus_one, whole_numbers
from moetool.format.gguf.delta_rules import QWEN3_5_MOE, without_middle
from moetool.format.gguf.family import GgufFamily

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_STREAMS = {"attn": "attn", "mlp": "ffn"}  # what reads them: in a checkpoint and in a file
_INDEXER = "self_attn.indexer"
_MOST_TOKENS, _MOST_HEADS = 8, 64  # of n-grams, in llama.cpp


def _taken_apart(config: Config, joined: Tensor) -> list[Tensor]:
    """Split the rows of an indexer's matrix, whose last head is that of keys, into queries and keys."""
    (wide,) = whole_numbers(config, "indexer_head_dim")
    return [joined[:-wide], joined[-wide:]]


def _put_together(_: Config, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


def _with_state(config: "PreTrainedConfig") -> list[bool]:
    """Whether each layer carries a state in the place of attention."""
    return [kind == "linear_attention" for kind in config.layer_types]


def _blocks(config: "PreTrainedConfig") -> list[int]:
    """How many tokens are pointed out together in each layer with attention."""
    return [0 if has_state else int(config.indexer_compress_ratio) for has_state in _with_state(config)]


def _heads_of_ngrams(config: "PreTrainedConfig") -> int:
    return int(config.ngram_size - 1) * int(config.heads_per_ngram)


def _layers_of_ngrams(config: "PreTrainedConfig") -> list[int] | None:
    """The layers, from 0, that are given embeddings of n-grams."""
    return [layer - 1 for layer in config.ple_layer_ids] or None


def _width_of_ngrams(config: "PreTrainedConfig") -> int | None:
    return int(config.ple_embed_dim) // _heads_of_ngrams(config) if config.ple_layer_ids else None


def _end_of_ngrams(config: "PreTrainedConfig") -> int | None:
    """Return the id of the token that ends a text, beyond which no n-gram goes."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return int(ends[0]) if config.ple_layer_ids else None


def _other_qwen4_exp(config: "PreTrainedConfig") -> str | None:
    if len(config.ple_layer_ids) > 1:
        return f"it has embeddings of n-grams in one layer alone (ple_layer_ids = {config.ple_layer_ids})"
    if config.ple_layer_ids and config.ple_embed_dim != config.hidden_size:
        return "its embeddings of n-grams are together as wide as others (ple_embed_dim)"
    if config.ngram_size > _MOST_TOKENS or _heads_of_ngrams(config) > _MOST_HEADS:
        return f"its n-grams have at most {_MOST_TOKENS} tokens (ngram_size), and {_MOST_HEADS} heads (heads_per_ngram)"
    return QWEN3_5_MOE.objection(config)


def _more_tokens(config: "PreTrainedConfig") -> str | None:
    """llama.cpp takes as many tokens as the most that transformers takes, whether or not they are whole blocks."""
    if (together := int(config.indexer_compress_ratio)) == 1:
        return None
    return (
        f"In texts of more than {config.indexer_budget} tokens (indexer_budget) llama.cpp attends to up to "
        f"{together - 1} tokens more than transformers: longer texts differ."
    )


_QWEN4_EXP = replace(
    QWEN3_5_MOE,
    model_type="qwen4_exp_text",
    architecture="qwen4exp",
    attention_interval=None,
    names={
        **QWEN3_5_MOE.names,
        **{f"ple.{one}_proj.weight": f"ple_{one}.weight" for one in ("key", "value")},
        **{
            f"{name}_hyper_connection.{part}.weight": f"hc_{own}_{short}.weight"
            for name, own in _STREAMS.items()
            for part, short in (
                ("input_mix_weight_down", "down"),
                ("input_mix_weight_up", "up"),
                ("block_inject_weight", "inject"),
            )
        },
    },
    outside={
        "model.norm.weight": "",
        **{
            f"model.hyper_connection_mixer.input_mix_weight_{one}.weight": f"output_hc_{one}.weight"
            for one in ("down", "up")
        },
    },
    changes={
        **{
            name: change
            for name, change in QWEN3_5_MOE.changes.items()
            if "layernorm" not in name and name != "model.norm.weight"
        },
        **{
            f"{name}_hyper_connection.hc_norm.weight": plus_one(f"hc_{own}_norm.weight")
            for name, own in _STREAMS.items()
        },
        "model.hyper_connection_mixer.hc_norm.weight": plus_one("output_hc_norm.weight"),
        **{f"ple.norm_{one}.weight": plus_one(f"ple_norm_{one}.weight") for one in ("key", "query", "conv")},
        "ple.conv1d.weight": without_middle("ple_conv1d.weight"),
        f"{_INDEXER}.index_qk_proj.weight": Change(
            ("indexer.q_proj.weight", "indexer.k_proj.weight"), _taken_apart, _put_together
        ),
        **{f"{_INDEXER}.{one}_layernorm.weight": plus_one(f"indexer.{one}_norm.weight") for one in ("q", "k")},
    },
    counts={
        **QWEN3_5_MOE.counts,
        "hc_count": "hyper_connection.count",
        "hc_lowrank": "hyper_connection.low_rank",
        "indexer_n_heads": "attention.indexer.head_count",
        "indexer_head_dim": "attention.indexer.key_length",
        "indexer_budget": "attention.indexer.top_k",
        "ngram_size": "ple.ngram_size",
        "heads_per_ngram": "ple.heads_per_ngram",
        "ple_conv_kernel_size": "ple.conv_kernel",
    },
    derived={
        "attention.recurrent_layers": _with_state,
        "attention.compress_ratios": _blocks,
        "ple.layers": _layers_of_ngrams,
        "embedding_length_per_layer_input": _width_of_ngrams,
        "ple.eos_token_id": _end_of_ngrams,
    },
    of_whole={"image_token_id": "ple.image_token_id"},
    constants={
        "ple.ple_embedding.layer_multipliers": "ple.layer_multipliers",
        "ple.ple_embedding.ngram_heads_offsets": "ple.head_offsets",
        "ple.ple_embedding.ngram_heads_vocab_sizes": "ple.head_vocab_sizes",
    },
    joined={"ple.ple_embedding.ngram_embedding.": "per_layer_token_embd.weight"},
    computes={"norm_topk_prob": (True,), "output_gate_type": ("sigmoid",), "attention_bias": (False,)},
    objection=_other_qwen4_exp,
    remark=_more_tokens,
)
OF_INDEXED: tuple[GgufFamily, ...] = (_QWEN4_EXP,)
