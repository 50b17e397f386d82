"""Gemma 4, whose heads are wider in layers that attend to all of a text, as llama.cpp computes it.

Its last layers may share keys and values with earlier ones, and every layer may be given a vector of each token.
Source: https://github.com/ggml-org/llama.cpp (`conversion/gemma.py`, `src/models/gemma4.cpp`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from moetool.format.gguf.family import GgufFamily, without_experts
from moetool.format.gguf.words import EXPERT_WIDTH

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_WINDOWED, _WHOLE = "sliding_attention", "full_attention"


def _bound_of_logits(config: "PreTrainedConfig") -> float:
    """0 for none, where llama.cpp takes 30 if a file says nothing."""
    return float(config.final_logit_softcapping or 0.0)


def _other_gemma4(config: "PreTrainedConfig") -> str | None:
    if config.hidden_size_per_layer_input and config.vocab_size_per_layer_input != config.vocab_size:
        return "every layer has as many vectors of tokens as there are embeddings (vocab_size_per_layer_input)"
    if not config.num_kv_shared_layers:
        return None
    if config.use_double_wide_mlp:
        return "moetool writes files of layers alike (use_double_wide_mlp)"
    own = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    if own[-2:] != [_WINDOWED, _WHOLE]:
        return (
            "layers that share keys and values take those of the last layer that has some, and with a window of the "
            "one before it (num_kv_shared_layers, layer_types)"
        )
    return None


_GEMMA4 = GgufFamily(
    "gemma4_text",
    "gemma4",
    is_moe=True,
    has_head_norms=True,
    has_two_widths=True,
    varies_heads=True,
    experts_key="num_experts",
    width_key=EXPERT_WIDTH,
    window_period=0,
    needs_windows=True,
    names={
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
        **{f"post_feedforward_layernorm_{one}.weight": f"post_ffw_norm_{one}.weight" for one in (1, 2)},
        **without_experts("mlp"),
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "layer_scalar": "layer_output_scale.weight",
        "per_layer_input_gate.weight": "inp_gate.weight",
        "per_layer_projection.weight": "proj.weight",
        "post_per_layer_input_norm.weight": "post_norm.weight",
    },
    outside={
        "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
        "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
        "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    },
    counts={
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    },
    derived={"final_logit_softcapping": _bound_of_logits},
    computes={"hidden_activation": ("gelu_pytorch_tanh",)},
    objection=_other_gemma4,
    pieces="gemma4",
)
GEMMA4: tuple[GgufFamily, ...] = (
    replace(_GEMMA4, implied={"enable_moe_block": lambda _: True}),
    replace(_GEMMA4, is_moe=False),
)
