"""Qwen4-Exp in GGUF: several residual streams, gated delta rules, and attention to those blocks of a text
that a small attention points out.

Sources: https://github.com/ggml-org/llama.cpp (`conversion/qwen4exp.py`, `src/models/qwen4exp.cpp`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.format.gguf.family import Change, Config, GgufFamily, whole_numbers
from moetool.format.gguf.recurrent import QWEN3_5_MOE, plus_one

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_STREAMS = {"attn": "attn", "mlp": "ffn"}  # what reads them: in a checkpoint and in a file
_INDEXER = "self_attn.indexer"


def _taken_apart(config: Config, joined: Tensor) -> list[Tensor]:
    """Rows of queries, then of one head of keys."""
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


def _other_qwen4_exp(config: "PreTrainedConfig") -> str | None:
    if config.ple_layer_ids:
        return "it has embeddings of n-grams in some layers (ple_layer_ids)"
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
        f"{_INDEXER}.index_qk_proj.weight": Change(
            ("indexer.q_proj.weight", "indexer.k_proj.weight"), _taken_apart, _put_together, keeps_inputs=True
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
    },
    derived={"attention.recurrent_layers": _with_state, "attention.compress_ratios": _blocks},
    computes={"norm_topk_prob": (True,), "output_gate_type": ("sigmoid",), "attention_bias": (False,)},
    objection=_other_qwen4_exp,
    remark=_more_tokens,
)
OF_INDEXED: tuple[GgufFamily, ...] = (_QWEN4_EXP,)
