"""Dense families before Llama, whose tensors have names of their own, as llama.cpp computes them.

Sources: https://github.com/ggml-org/llama.cpp (`conversion/`, `src/models/`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.errors import InvalidInputError
from moetool.format.gguf.changes import Change, Config, changed, transposed, whole_numbers
from moetool.format.gguf.dense import (
    EPSILON,
    FULLY_CONNECTED,
    GELU,
    NORM_BIASES,
    ROUNDED_GELU,
    TANH_GELU,
    pair,
    rounded_gelu,
)
from moetool.format.gguf.family import GgufFamily, Metadata
from moetool.format.gguf.words import EMBEDDINGS, HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_Counted = Callable[[Config], tuple[int, int]]  # heads of queries and of keys


def _by_kind(counted: _Counted, config: Config, rows: Tensor) -> Tensor:
    """Rows of each head of keys, behind those of its queries and before those of its values, as all queries, all keys
    and all values."""
    heads, keys = counted(config)
    groups = rows.unflatten(0, (keys, heads // keys + 2, -1))
    return torch.cat([groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)])


def _by_head(counted: _Counted, config: Config, rows: Tensor) -> Tensor:
    """Rows of all queries, keys and values, head of keys by head of keys again, as they were before `_by_kind`."""
    heads, keys = counted(config)
    queries, turned, values = rows.unflatten(0, (heads + 2 * keys, -1)).split([heads, keys, keys])
    return torch.cat([queries.unflatten(0, (keys, -1)), turned[:, None], values[:, None]], dim=1).flatten(0, 2)


def _rearranged(module: str, counted: _Counted) -> dict[str, Change]:
    """The changes of a module that makes queries, keys and values head by head."""
    weight, bias = (
        changed(f"attn_qkv.{part}", partial(_by_kind, counted), partial(_by_head, counted))
        for part in ("weight", "bias")
    )
    return {f"{module}.weight": replace(weight, keeps_inputs=True), f"{module}.bias": bias}


def _as_many(key: str, config: Config) -> tuple[int, int]:
    """Heads of queries and of keys, where there are as many; `key` is their entry."""
    [heads] = whole_numbers(config, key)
    return heads, heads


def _heads_of_falcon(config: Config) -> tuple[int, int]:
    heads, keys = whole_numbers(config, "num_attention_heads", "num_kv_heads")
    return heads, keys if config["new_decoder_architecture"] or not config["multi_query"] else 1


def _is_new_falcon(config: Config) -> bool:
    """Whether it has several heads of keys, or norms of its own for attention: else it is as the first Falcon."""
    return (config["num_kv_heads"], config["num_ln_in_parallel_attn"]) != (1, 1)


_FOUR_TIMES = {**pair("mlp.dense_h_to_4h", "ffn_up"), **pair("mlp.dense_4h_to_h", "ffn_down")}
_ELSEWHERE = ("model.embed_tokens.weight", "model.norm.weight")
_GPT_NEOX = GgufFamily(
    "gpt_neox",
    "gptneox",
    is_moe=False,
    is_partial=True,
    needs_head=True,
    layer="gpt_neox.layers.{layer}",
    names={**NORM_BIASES, **pair("attention.dense", "attn_output")},
    outside={
        **dict.fromkeys((*_ELSEWHERE, "lm_head.weight"), ""),
        "gpt_neox.embed_in.weight": EMBEDDINGS,
        **pair("gpt_neox.final_layer_norm", "output_norm"),
        "embed_out.weight": HEAD,
    },
    dense=_FOUR_TIMES,
    changes=_rearranged("attention.query_key_value", partial(_as_many, "num_attention_heads")),
    multipliers={"layer_norm_eps": EPSILON},
    flags={"use_parallel_residual": "use_parallel_residual"},
    computes={"hidden_act": GELU, "attention_bias": (True,)},
    remark=rounded_gelu,
)
_QUERY_KEY_VALUE = "self_attention.query_key_value"
_BLOOM = GgufFamily(
    "bloom",
    "bloom",
    is_moe=False,
    layer="transformer.h.{layer}",
    names={**NORM_BIASES, **pair("self_attention.dense", "attn_output")},
    outside={
        **dict.fromkeys(_ELSEWHERE, ""),
        "transformer.word_embeddings.weight": EMBEDDINGS,
        **pair("transformer.word_embeddings_layernorm", "token_embd_norm"),
        **pair("transformer.ln_f", "output_norm"),
    },
    dense=_FOUR_TIMES,
    changes=_rearranged(_QUERY_KEY_VALUE, partial(_as_many, "n_head")),
    multipliers={"layer_norm_epsilon": EPSILON},
    derived={"context_length": lambda config: int(getattr(config, "seq_length", 2048))},
    computes={"apply_residual_connection_post_layernorm": (False,)},
    cutting="bloom",
)
_FALCON = GgufFamily(
    "falcon",
    "falcon",
    is_moe=False,
    layer="transformer.h.{layer}",
    names={
        **NORM_BIASES,
        **pair("ln_attn", "attn_norm_2"),
        **pair("ln_mlp", "attn_norm"),
        "self_attention.dense.weight": "attn_output.weight",
    },
    outside={
        **dict.fromkeys(_ELSEWHERE, ""),
        "transformer.word_embeddings.weight": EMBEDDINGS,
        **pair("transformer.ln_f", "output_norm"),
    },
    dense=_FOUR_TIMES,
    changes=_rearranged(_QUERY_KEY_VALUE, _heads_of_falcon),
    key_heads=lambda config: _heads_of_falcon(config.to_dict())[1],
    dense_width="ffn_hidden_size",
    without={"attn_norm_2.weight": pair("input_layernorm", "attn_norm")},
    multipliers={"layer_norm_epsilon": EPSILON},
    implied={
        "new_decoder_architecture": _is_new_falcon,
        "multi_query": lambda config: not _is_new_falcon(config),
        "activation": lambda _: "gelu",
    },
    computes={"activation": GELU, "alibi": (False,), "parallel_attn": (True,), "bias": (False,)},
    remark=rounded_gelu,
    cutting="falcon",
)
_GPT_LAYER = {
    **pair("ln_1", "attn_norm"),
    **pair("ln_2", "ffn_norm"),
    **pair("attn.c_attn", "attn_qkv"),
    **pair("attn.c_proj", "attn_output"),
}
_GPT_BIGCODE = GgufFamily(
    "gpt_bigcode",
    "starcoder",
    is_moe=False,
    layer="transformer.h.{layer}",
    names=_GPT_LAYER,
    outside={
        **dict.fromkeys(_ELSEWHERE, ""),
        "transformer.wte.weight": EMBEDDINGS,
        "transformer.wpe.weight": "position_embd.weight",
        **pair("transformer.ln_f", "output_norm"),
    },
    dense=FULLY_CONNECTED,
    dense_width="n_inner",
    multipliers={"layer_norm_epsilon": EPSILON},
    computes={"activation_function": TANH_GELU, "scale_attn_weights": (True,), "multi_query": (True,)},
)
_GPT2 = replace(
    _GPT_BIGCODE,
    model_type="gpt2",
    architecture="gpt2",
    changes={
        name: transposed(own)
        for name, own in {**_GPT_LAYER, **FULLY_CONNECTED}.items()
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    },
    computes={
        "activation_function": TANH_GELU,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
)
_ALIBI_MAX = 8  # of transformers' MPT, whatever a config says


def _clamp_of_mpt(config: "PreTrainedConfig") -> float | None:
    bound = config.attn_config.clip_qkv
    return float(bound) if bound else None


def _attention_of_mpt(said: Metadata) -> dict[str, object]:
    bound, most = said.get("attention.clamp_kqv"), said["attention.max_alibi_bias"]
    if not most:
        raise InvalidInputError(
            "This MPT in a GGUF file has no ALiBi (attention.max_alibi_bias), which transformers adds to all scores."
        )
    return {"alibi": True, "alibi_bias_max": round(most), "clip_qkv": float(bound) if bound else None}


def _other_mpt(config: "PreTrainedConfig") -> str | None:
    own, width = config.attn_config, config.d_model // config.n_heads
    if not own.alibi:
        return "transformers adds ALiBi to this model's scores, and it has to be there (alibi)"
    if own.softmax_scale is not None and not math.isclose(own.softmax_scale, width**-0.5):
        return f"it divides scores by √{width} (softmax_scale)"
    return None


def _remark_on_mpt(config: "PreTrainedConfig") -> str:
    if (most := config.attn_config.alibi_bias_max) == _ALIBI_MAX:
        return ROUNDED_GELU
    return (
        f"{ROUNDED_GELU} It adds ALiBi to scores as the config says (alibi_bias_max = {most}), transformers as if it "
        f"said {_ALIBI_MAX}: logits differ."
    )


_MPT = GgufFamily(
    "mpt",
    "mpt",
    is_moe=False,
    layer="transformer.blocks.{layer}",
    names={
        "norm_1.weight": "attn_norm.weight",
        "norm_2.weight": "ffn_norm.weight",
        "attn.Wqkv.weight": "attn_qkv.weight",
        "attn.out_proj.weight": "attn_output.weight",
    },
    outside={
        **dict.fromkeys(_ELSEWHERE, ""),
        "transformer.wte.weight": EMBEDDINGS,
        "transformer.norm_f.weight": "output_norm.weight",
    },
    dense={f"ffn.{role}_proj.weight": f"ffn_{role}.weight" for role in ("up", "down")},
    multipliers={"layer_norm_epsilon": EPSILON},
    derived={
        "context_length": lambda config: int(config.max_seq_len),
        "attention.max_alibi_bias": lambda config: float(config.attn_config.alibi_bias_max),
        "attention.clamp_kqv": _clamp_of_mpt,
    },
    told={"attn_config": _attention_of_mpt, "max_seq_len": lambda said: said["context_length"]},
    objection=_other_mpt,
    remark=_remark_on_mpt,
)

BEFORE_LLAMA: tuple[GgufFamily, ...] = (_GPT_NEOX, _BLOOM, _FALCON, _GPT_BIGCODE, _GPT2, _MPT)
