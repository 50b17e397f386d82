"""Dense families, as llama.cpp computes them.

Sources: https://github.com/ggml-org/llama.cpp (`conversion/`, `src/models/`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.format.gguf.family import (
    Change,
    Config,
    GgufFamily,
    changed,
    head_norms,
    norms_plus_one,
    nothing,
    plus_one,
    transposed,
    whole_numbers,
)
from moetool.format.gguf.routing import ALL_BIASES, GRANITE, INNER_BIASES, POST_ATTENTION, UNBIASED
from moetool.format.gguf.words import EMBEDDINGS, HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_Counted = Callable[[Config], tuple[int, int]]  # heads of queries and of keys
_EPSILON = "attention.layer_norm_epsilon"
_TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # the same function, which llama.cpp calls GELU
_GELU = (*_TANH_GELU, "gelu")
_TIED: Mapping[str, tuple[object, ...]] = {"tie_word_embeddings": (True,)}
_POST_NORMS = {**POST_ATTENTION, "post_feedforward_layernorm.weight": "post_ffw_norm.weight"}
_NORM_BIASES = {
    "input_layernorm.bias": "attn_norm.bias",
    "post_attention_layernorm.bias": "ffn_norm.bias",
}
_OUTPUT_NORM_BIAS = {"model.norm.bias": "output_norm.bias"}
# Gate above up in one matrix, which llama.cpp keeps.
_GATE_UP = {"mlp.gate_up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight"}


def _pair(module: str, own: str) -> dict[str, str]:
    """Names of the weight and the bias of a module."""
    return {f"{module}.{part}": f"{own}.{part}" for part in ("weight", "bias")}


_UNGATED = {**_pair("mlp.up_proj", "ffn_up"), **_pair("mlp.down_proj", "ffn_down")}

MISTRAL = GgufFamily("mistral", "llama", is_moe=False, is_read=True, is_interleaved=True, slows_rope=True)
_LLAMA = replace(MISTRAL, model_type="llama", biases=ALL_BIASES)
GRANITE_DENSE = replace(_LLAMA, model_type="granite", architecture="granite", multipliers=GRANITE)


def _other_gemma(largest: int) -> Callable[["PreTrainedConfig"], str | None]:
    """Make the objection of a Gemma: llama.cpp divides scores by a root that only depends on whether the model has as
    many layers as the largest."""

    def objection(config: "PreTrainedConfig") -> str | None:
        is_largest = config.num_hidden_layers == largest
        divisor = config.hidden_size // config.num_attention_heads if is_largest else config.head_dim
        if config.query_pre_attn_scalar != divisor:
            return f"it divides scores by √{divisor} in a model of so many layers (query_pre_attn_scalar)"
        return None

    return objection


def _other_gemma2(config: "PreTrainedConfig") -> str | None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if not getattr(config, key):
            return f"it bounds scores and logits ({key})"
    return _other_gemma(46)(config)


def _other_gemma3(config: "PreTrainedConfig") -> str | None:
    kind = (config.rope_parameters.get("full_attention") or {}).get("rope_type", "default")
    if kind not in ("default", "linear"):
        return f"it has no rotary embeddings '{kind}' in some layers alone"
    return _other_gemma(62)(config)


def _rounded_gelu(config: "PreTrainedConfig") -> str | None:
    if "gelu" not in (getattr(config, "hidden_act", None), getattr(config, "activation", None)):
        return None
    return "llama.cpp computes GELU by tanh, transformers by the error function: logits differ slightly."


def _gemma_norms(*further: tuple[str, str]) -> dict[str, Change]:
    """The changes of a Gemma's norms, with those of further ones before or behind a feed-forward network."""
    before = "post_attention_norm.weight" if further else "ffn_norm.weight"
    return {**norms_plus_one(before), **{f"{name}.weight": plus_one(f"{own}.weight") for name, own in further}}


_GEMMA_NORMS = _gemma_norms(("pre_feedforward_layernorm", "ffn_norm"), ("post_feedforward_layernorm", "post_ffw_norm"))
_GEMMA = GgufFamily(
    "gemma",
    "gemma",
    is_moe=False,
    changes=_gemma_norms(),
    computes={"hidden_act": _GELU, "use_bidirectional_attention": (False, None), **_TIED, **UNBIASED},
    remark=_rounded_gelu,
)
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    architecture="gemma2",
    window_period=0,
    needs_windows=True,
    changes=_GEMMA_NORMS,
    multipliers={
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    computes={**_GEMMA.computes, "hidden_activation": _TANH_GELU},
    objection=_other_gemma2,
    remark=nothing,
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    architecture="gemma3",
    needs_windows=False,
    multipliers={"final_logit_softcapping": "final_logit_softcapping"},
    computes={**_GEMMA2.computes, "attn_logit_softcapping": (None,)},
    objection=_other_gemma3,
)


def _other_smollm3(config: "PreTrainedConfig") -> str | None:
    if list(map(bool, config.no_rope_layers)) != [bool(layer % 4) for layer in range(1, config.num_hidden_layers + 1)]:
        return "every fourth layer, and no other, has no rotary embeddings (no_rope_layers)"
    return None


def _other_cohere(config: "PreTrainedConfig") -> str | None:
    if config.use_qk_norm != (config.num_hidden_layers >= 64):
        return "it norms queries and keys of models of 64 layers and more (use_qk_norm)"
    return None


_COHERE = GgufFamily(
    "cohere",
    "command-r",
    is_moe=False,
    is_square=True,
    has_head_norms=True,
    multipliers={"layer_norm_eps": _EPSILON, "logit_scale": "logit_scale"},
    computes={**_TIED, **UNBIASED},
    objection=_other_cohere,
    cutting="command-r",
)


def _other_exaone(config: "PreTrainedConfig") -> str | None:
    if config.num_hidden_layers == 64:
        return None if config.sliding_window else "models of 64 layers have layers with windows (sliding_window)"
    if config.sliding_window:
        return (
            "only models of 64 layers have layers with windows, and others without rotary embeddings (sliding_window)"
        )
    return None


def _other_ministral(config: "PreTrainedConfig") -> str | None:
    rope = config.rope_parameters
    if rope.get("llama_4_scaling_beta") and rope["rope_type"] != "yarn":
        return "it weighs queries by their places only beside YaRN (llama_4_scaling_beta)"
    return None


_OLMO2 = GgufFamily(
    "olmo2",
    "olmo2",
    is_moe=False,
    is_square=True,
    needs_head=True,
    has_head_norms=True,
    names=_POST_NORMS,
    computes=UNBIASED,
)
_GLM4 = GgufFamily(
    "glm4",
    "glm4",
    is_moe=False,
    is_partial=True,
    biases=INNER_BIASES,
    names={
        "post_self_attn_layernorm.weight": "post_attention_norm.weight",
        "post_mlp_layernorm.weight": "post_ffw_norm.weight",
    },
    dense=_GATE_UP,
    cutting="glm4",
)


def _by_kind(counted: _Counted, config: Config, rows: Tensor) -> Tensor:
    """Rows of each head of keys, behind those of its queries and before those of its values, as all queries, all keys
    and all values."""
    heads, keys = counted(config)
    groups = rows.unflatten(0, (keys, heads // keys + 2, -1))
    return torch.cat([groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)])


def _by_head(counted: _Counted, config: Config, rows: Tensor) -> Tensor:
    """Undo `_by_kind`."""
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


_FULLY_CONNECTED = {**_pair("mlp.c_fc", "ffn_up"), **_pair("mlp.c_proj", "ffn_down")}
_FOUR_TIMES = {**_pair("mlp.dense_h_to_4h", "ffn_up"), **_pair("mlp.dense_4h_to_h", "ffn_down")}
_ELSEWHERE = ("model.embed_tokens.weight", "model.norm.weight")
_GPT_NEOX = GgufFamily(
    "gpt_neox",
    "gptneox",
    is_moe=False,
    is_partial=True,
    needs_head=True,
    layer="gpt_neox.layers.{layer}",
    names={**_NORM_BIASES, **_pair("attention.dense", "attn_output")},
    outside={
        **dict.fromkeys((*_ELSEWHERE, "lm_head.weight"), ""),
        "gpt_neox.embed_in.weight": EMBEDDINGS,
        **_pair("gpt_neox.final_layer_norm", "output_norm"),
        "embed_out.weight": HEAD,
    },
    dense=_FOUR_TIMES,
    changes=_rearranged("attention.query_key_value", partial(_as_many, "num_attention_heads")),
    multipliers={"layer_norm_eps": _EPSILON},
    flags={"use_parallel_residual": "use_parallel_residual"},
    computes={"hidden_act": _GELU, "attention_bias": (True,)},
    remark=_rounded_gelu,
)
_QUERY_KEY_VALUE = "self_attention.query_key_value"
_BLOOM = GgufFamily(
    "bloom",
    "bloom",
    is_moe=False,
    layer="transformer.h.{layer}",
    names={**_NORM_BIASES, **_pair("self_attention.dense", "attn_output")},
    outside={
        **dict.fromkeys(_ELSEWHERE, ""),
        "transformer.word_embeddings.weight": EMBEDDINGS,
        **_pair("transformer.word_embeddings_layernorm", "token_embd_norm"),
        **_pair("transformer.ln_f", "output_norm"),
    },
    dense=_FOUR_TIMES,
    changes=_rearranged(_QUERY_KEY_VALUE, partial(_as_many, "n_head")),
    multipliers={"layer_norm_epsilon": _EPSILON},
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
        **_NORM_BIASES,
        **_pair("ln_attn", "attn_norm_2"),
        **_pair("ln_mlp", "attn_norm"),
        "self_attention.dense.weight": "attn_output.weight",
    },
    outside={
        **dict.fromkeys(_ELSEWHERE, ""),
        "transformer.word_embeddings.weight": EMBEDDINGS,
        **_pair("transformer.ln_f", "output_norm"),
    },
    dense=_FOUR_TIMES,
    changes=_rearranged(_QUERY_KEY_VALUE, _heads_of_falcon),
    key_heads=lambda config: _heads_of_falcon(config.to_dict())[1],
    multipliers={"layer_norm_epsilon": _EPSILON},
    computes={"activation": _GELU, "alibi": (False,), "parallel_attn": (True,), "bias": (False,)},
    remark=_rounded_gelu,
    cutting="falcon",
)
_GPT_LAYER = {
    **_pair("ln_1", "attn_norm"),
    **_pair("ln_2", "ffn_norm"),
    **_pair("attn.c_attn", "attn_qkv"),
    **_pair("attn.c_proj", "attn_output"),
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
        **_pair("transformer.ln_f", "output_norm"),
    },
    dense=_FULLY_CONNECTED,
    multipliers={"layer_norm_epsilon": _EPSILON},
    computes={"activation_function": _TANH_GELU, "scale_attn_weights": (True,), "multi_query": (True,)},
)
_GPT2 = replace(
    _GPT_BIGCODE,
    model_type="gpt2",
    architecture="gpt2",
    changes={
        name: transposed(own)
        for name, own in {**_GPT_LAYER, **_FULLY_CONNECTED}.items()
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    },
    computes={
        "activation_function": _TANH_GELU,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
)
DENSE: tuple[GgufFamily, ...] = (
    _LLAMA,
    MISTRAL,
    GgufFamily("qwen2", "qwen2", is_moe=False, is_read=True, is_square=True, biases=INNER_BIASES),
    GgufFamily("qwen3", "qwen3", is_moe=False, is_read=True, has_head_norms=True, biases=INNER_BIASES),
    GRANITE_DENSE,
    replace(_LLAMA, model_type="iquestcoder", is_read=False),
    _GEMMA,
    _GEMMA2,
    _GEMMA3,
    GgufFamily(
        "phi3",
        "phi3",
        is_moe=False,
        is_square=True,
        is_partial=True,
        has_long_rope=True,
        names={"self_attn.qkv_proj.weight": "attn_qkv.weight"},
        dense=_GATE_UP,
    ),
    _OLMO2,
    replace(_OLMO2, model_type="olmo3", window_period=0, windows_turn_alike=True),
    replace(
        MISTRAL,
        model_type="smollm3",
        architecture="smollm3",
        is_read=False,
        slows_rope=False,
        biases=INNER_BIASES,
        objection=_other_smollm3,
    ),
    _COHERE,
    replace(
        _COHERE,
        model_type="cohere2",
        architecture="cohere2",
        has_head_norms=False,
        window_period=0,
        needs_windows=True,
        windows_turn_alike=True,
        objection=nothing,
    ),
    _GLM4,
    GgufFamily(
        "starcoder2",
        "starcoder2",
        is_moe=False,
        is_square=True,
        biases=ALL_BIASES,
        names=_NORM_BIASES,
        outside=_OUTPUT_NORM_BIAS,
        dense=_FULLY_CONNECTED,
        multipliers={"norm_epsilon": _EPSILON},
        computes={"hidden_act": _TANH_GELU, "use_bias": (True,)},
    ),
    GgufFamily(
        "stablelm",
        "stablelm",
        is_moe=False,
        is_square=True,
        is_partial=True,
        needs_head=True,
        biases=INNER_BIASES,
        names=_NORM_BIASES,
        outside=_OUTPUT_NORM_BIAS,
        multipliers={"layer_norm_eps": _EPSILON},
        computes={"qk_layernorm": (False,)},
        cutting="stablelm2",
    ),
    GgufFamily(
        "exaone4",
        "exaone4",
        is_moe=False,
        is_square=True,
        has_head_norms=True,
        slows_rope=True,
        names=_POST_NORMS,
        window_period=0,
        windows_turn_alike=True,
        objection=_other_exaone,
        cutting="exaone4",
    ),
    GgufFamily(
        "hunyuan_v1_dense",
        "hunyuan-dense",
        is_moe=False,
        names=head_norms("query_layernorm", "key_layernorm"),
        stretches_rope=True,
        computes=UNBIASED,
        cutting="hunyuan-dense",
    ),
    GgufFamily(
        "seed_oss",
        "seed_oss",
        is_moe=False,
        biases=INNER_BIASES,
        names=POST_ATTENTION,
        computes={"attention_out_bias": (False,), "mlp_bias": (False,)},
        cutting="seed-coder",
    ),
    replace(MISTRAL, model_type="ministral3", architecture="mistral3", is_read=False, objection=_other_ministral),
    GgufFamily(
        "nemotron",
        "nemotron",
        is_moe=False,
        is_square=True,
        is_partial=True,
        needs_head=True,
        biases=ALL_BIASES,
        names=_NORM_BIASES,
        outside=_OUTPUT_NORM_BIAS,
        dense=_UNGATED,
        changes=norms_plus_one("ffn_norm.weight"),
        multipliers={"norm_eps": _EPSILON},
        computes={"hidden_act": ("relu2",)},
    ),
    replace(
        MISTRAL,
        model_type="arcee",
        architecture="arcee",
        is_read=False,
        dense=_UNGATED,
        computes={"hidden_act": ("relu2",), "mlp_bias": (False,)},
    ),
    GgufFamily(
        "apertus",
        "apertus",
        is_moe=False,
        needs_head=True,
        has_head_norms=True,
        slows_rope=True,
        names={"attention_layernorm.weight": "attn_norm.weight", "feedforward_layernorm.weight": "ffn_norm.weight"},
        dense=_UNGATED,
        numbers={f"mlp.act_fn.{number}": f"xielu.{number}" for number in ("alpha_p", "alpha_n", "beta", "eps")},
        computes={"hidden_act": ("xielu",), "mlp_bias": (False,)},
    ),
    GgufFamily("ernie4_5", "ernie4_5", is_moe=False, computes={"use_bias": (False,)}),
    GgufFamily(
        "olmo",
        "olmo",
        is_moe=False,
        is_interleaved=True,
        is_square=True,
        multipliers={"clip_qkv": "attention.clamp_kqv"},
        fixed={_EPSILON: 1e-5},
        computes=UNBIASED,
    ),
    GgufFamily(
        "phi",
        "phi2",
        is_moe=False,
        is_square=True,
        is_partial=True,
        needs_head=True,
        biases=INNER_BIASES,
        names={
            "input_layernorm.bias": "attn_norm.bias",
            **_pair("self_attn.dense", "attn_output"),
        },
        outside={
            "model.norm.weight": "",
            **_pair("model.final_layernorm", "output_norm"),
            "lm_head.bias": "output.bias",
        },
        dense={**_pair("mlp.fc1", "ffn_up"), **_pair("mlp.fc2", "ffn_down")},
        multipliers={"layer_norm_eps": _EPSILON},
        computes={"hidden_act": _TANH_GELU, "qk_layernorm": (False,)},
    ),
    replace(_GLM4, model_type="glm", architecture="chatglm", is_square=True, names={}),
    _GPT_NEOX,
    _BLOOM,
    _FALCON,
    _GPT_BIGCODE,
    _GPT2,
)
