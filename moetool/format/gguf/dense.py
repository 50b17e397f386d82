"""Dense families, as llama.cpp computes them.

Sources: https://github.com/ggml-org/llama.cpp (`conversion/`, `src/models/`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moetool.format.gguf.changes import Change, Config, head_norms, norms_plus_one, plus_one, whole_numbers
from moetool.format.gguf.family import GgufFamily, nothing
from moetool.format.gguf.routing import ALL_BIASES, GRANITE, INNER_BIASES, POST_ATTENTION, UNBIASED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EPSILON = "attention.layer_norm_epsilon"
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # the same function, which llama.cpp calls GELU
GELU = (*TANH_GELU, "gelu")
_TIED: Mapping[str, tuple[object, ...]] = {"tie_word_embeddings": (True,)}
_POST_NORMS = {**POST_ATTENTION, "post_feedforward_layernorm.weight": "post_ffw_norm.weight"}
NORM_BIASES = {
    "input_layernorm.bias": "attn_norm.bias",
    "post_attention_layernorm.bias": "ffn_norm.bias",
}
_OUTPUT_NORM_BIAS = {"model.norm.bias": "output_norm.bias"}
# Gate above up in one matrix, which llama.cpp keeps.
_GATE_UP = {"mlp.gate_up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight"}


def pair(module: str, own: str) -> dict[str, str]:
    """Map the names of the weight and the bias of a module to those of a file."""
    return {f"{module}.{part}": f"{own}.{part}" for part in ("weight", "bias")}


FULLY_CONNECTED = {**pair("mlp.c_fc", "ffn_up"), **pair("mlp.c_proj", "ffn_down")}
_UNGATED = {**pair("mlp.up_proj", "ffn_up"), **pair("mlp.down_proj", "ffn_down")}
_GATED_WITH_BIASES = {**pair("mlp.gate_proj", "ffn_gate"), **_UNGATED}

MISTRAL = GgufFamily("mistral", "llama", is_moe=False, is_interleaved=True, slows_rope=True)
_LLAMA = replace(MISTRAL, model_type="llama", biases=ALL_BIASES, dense=_GATED_WITH_BIASES)
GRANITE_DENSE = replace(MISTRAL, model_type="granite", architecture="granite", biases=ALL_BIASES, multipliers=GRANITE)


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


def _divisor(largest: int) -> Callable[[Config], object]:
    """Make the divisor of a Gemma's scores, squared, as `_other_gemma` says it."""

    def divisor(config: Config) -> object:
        layers, hidden, heads, width = whole_numbers(
            config, "num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim"
        )
        return hidden // heads if layers == largest else width

    return divisor


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


ROUNDED_GELU = "llama.cpp computes GELU by tanh, transformers by the error function: logits differ slightly."


def rounded_gelu(config: "PreTrainedConfig") -> str | None:
    named = getattr(config, "hidden_act", None), getattr(config, "activation", None)
    return ROUNDED_GELU if "gelu" in named else None


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
    computes={"hidden_act": GELU, "use_bidirectional_attention": (False, None), **_TIED, **UNBIASED},
    remark=rounded_gelu,
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
    computes={**_GEMMA.computes, "hidden_activation": TANH_GELU},
    implied={"query_pre_attn_scalar": _divisor(46)},
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
    implied={"query_pre_attn_scalar": _divisor(62)},
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
    multipliers={"layer_norm_eps": EPSILON, "logit_scale": "logit_scale"},
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
QWEN2 = GgufFamily("qwen2", "qwen2", is_moe=False, is_square=True, biases=INNER_BIASES)
QWEN3 = GgufFamily("qwen3", "qwen3", is_moe=False, has_head_norms=True, biases=INNER_BIASES)
ERNIE = GgufFamily("ernie4_5", "ernie4_5", is_moe=False, computes={"use_bias": (False,)})
_HUNYUAN = GgufFamily(
    "hunyuan_v1_dense",
    "hunyuan-dense",
    is_moe=False,
    names=head_norms("query_layernorm", "key_layernorm"),
    stretches_rope=True,
    computes=UNBIASED,
    cutting="hunyuan-dense",
)
GLM4 = GgufFamily(
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
_APERTUS = GgufFamily(
    "apertus",
    "apertus",
    is_moe=False,
    needs_head=True,
    has_head_norms=True,
    slows_rope=True,
    names={"attention_layernorm.weight": "attn_norm.weight", "feedforward_layernorm.weight": "ffn_norm.weight"},
    dense=_UNGATED,
    numbers={
        **{f"mlp.act_fn.alpha_{sign}": (f"xielu.alpha_{sign}", (1,)) for sign in ("p", "n")},
        **{f"mlp.act_fn.{number}": (f"xielu.{number}", ()) for number in ("beta", "eps")},
    },
    computes={"hidden_act": ("xielu",), "mlp_bias": (False,)},
)
DENSE: tuple[GgufFamily, ...] = (
    _LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GRANITE_DENSE,
    replace(_LLAMA, model_type="iquestcoder"),
    replace(_LLAMA, model_type="internlm3"),
    # EXAONE 3 is a Llama of which a file has rows of queries and keys as they are.
    replace(_LLAMA, architecture="exaone", is_interleaved=False),
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
    GLM4,
    GgufFamily(
        "starcoder2",
        "starcoder2",
        is_moe=False,
        is_square=True,
        biases=ALL_BIASES,
        names=NORM_BIASES,
        outside=_OUTPUT_NORM_BIAS,
        dense=FULLY_CONNECTED,
        multipliers={"norm_epsilon": EPSILON},
        computes={"hidden_act": TANH_GELU, "use_bias": (True,)},
    ),
    GgufFamily(
        "stablelm",
        "stablelm",
        is_moe=False,
        is_square=True,
        is_partial=True,
        needs_head=True,
        biases=INNER_BIASES,
        names=NORM_BIASES,
        outside=_OUTPUT_NORM_BIAS,
        multipliers={"layer_norm_eps": EPSILON},
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
    _HUNYUAN,
    GgufFamily(
        "seed_oss",
        "seed_oss",
        is_moe=False,
        biases=INNER_BIASES,
        names=POST_ATTENTION,
        computes={"attention_out_bias": (False,), "mlp_bias": (False,)},
        cutting="seed-coder",
    ),
    replace(MISTRAL, model_type="ministral3", architecture="mistral3", objection=_other_ministral),
    GgufFamily(
        "nemotron",
        "nemotron",
        is_moe=False,
        is_square=True,
        is_partial=True,
        needs_head=True,
        biases=ALL_BIASES,
        names=NORM_BIASES,
        outside=_OUTPUT_NORM_BIAS,
        dense=_UNGATED,
        changes=norms_plus_one("ffn_norm.weight"),
        multipliers={"norm_eps": EPSILON},
        computes={"hidden_act": ("relu2",)},
    ),
    replace(
        MISTRAL,
        model_type="arcee",
        architecture="arcee",
        dense=_UNGATED,
        computes={"hidden_act": ("relu2",), "mlp_bias": (False,)},
    ),
    _APERTUS,
    # Its head may have fewer rows than its embeddings, which llama.cpp's may not.
    replace(_APERTUS, model_type="apertus1p5_text", computes={**_APERTUS.computes, "output_vocab_size": (None,)}),
    ERNIE,
    GgufFamily(
        "olmo",
        "olmo",
        is_moe=False,
        is_interleaved=True,
        is_square=True,
        multipliers={"clip_qkv": "attention.clamp_kqv"},
        fixed={EPSILON: 1e-5},
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
            **pair("self_attn.dense", "attn_output"),
        },
        outside={
            "model.norm.weight": "",
            **pair("model.final_layernorm", "output_norm"),
            "lm_head.bias": "output.bias",
        },
        dense={**pair("mlp.fc1", "ffn_up"), **pair("mlp.fc2", "ffn_down")},
        multipliers={"layer_norm_eps": EPSILON},
        computes={"hidden_act": TANH_GELU, "qk_layernorm": (False,)},
    ),
    replace(GLM4, model_type="glm", architecture="chatglm", is_square=True, names={}),
)
