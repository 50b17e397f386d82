"""Dense families that lie in models that see or hear, and turn queries and keys by several axes (M-RoPE), as llama.cpp
computes them. In a text all axes are alike; what a file says of them is for the file with the part that sees.

Sources: https://github.com/ggml-org/llama.cpp (`conversion/qwenvl.py`, `conversion/qwen3vl.py`, `conversion/glm.py`,
`conversion/ernie.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from moetool.format.gguf.changes import Change, Config, changed, whole_numbers
from moetool.format.gguf.dense import ERNIE, GLM4, QWEN2, QWEN3
from moetool.format.gguf.family import GgufFamily
from moetool.format.gguf.words import halved, interleaved, with_first

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Models around a language model of whose other parts llama.cpp's converter makes a file (`conversion/__init__.py`).
SEEN_BY_CONVERTER = frozenset(
    {
        "deepseek_ocr2", "dots3_note", "exaone4_5", "gemma3", "gemma4", "gemma4_unified", "glm4v", "glm4v_moe",
        "glm5_next", "glm_ocr", "granite4_vision", "idefics3", "janus", "kimi_k25", "lfm2_vl", "lighton_ocr", "llama4",
        "minicpmv4_6", "minimax_m3_vl", "mistral3", "muse_glimmer", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe",
        "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "smolvlm", "step3p7", "unlimited_ocr",
    }
)  # fmt: skip
_TURNED = 0.5  # of a head's channels, where a config does not say


def _first_turned(config: Config, rows: Tensor, heads: str, *, back: bool = False) -> Tensor:
    """Rows of each head of which the first, which rotary embeddings turn, are ordered by halves: llama.cpp turns
    neighbours by no axes. `back` undoes it."""
    width, queries, count = whole_numbers(config, "hidden_size", "num_attention_heads", heads)
    rope = config["rope_parameters"]
    share = rope.get("partial_rotary_factor", _TURNED) if isinstance(rope, Mapping) else _TURNED
    first = int(int(config.get("head_dim") or width // queries) * float(share))  # type: ignore[call-overload]
    return with_first(interleaved if back else halved, rows, count, first)


def _of_heads(module: str, own: str, heads: str) -> dict[str, Change]:
    there, back = partial(_first_turned, heads=heads), partial(_first_turned, heads=heads, back=True)
    weight, bias = (changed(f"{own}.{part}", there, back) for part in ("weight", "bias"))
    return {f"self_attn.{module}.weight": replace(weight, keeps_inputs=True), f"self_attn.{module}.bias": bias}


def _adds_nothing(config: "PreTrainedConfig") -> str:
    return (
        f"llama.cpp's 'qwen2vl' reads no rms_norm_eps, and adds 0 in norms where transformers adds "
        f"{config.rms_norm_eps}: logits differ slightly."
    )


_QWEN2_VL = replace(QWEN2, model_type="qwen2_vl_text", architecture="qwen2vl", axes=(16, 24, 24), remark=_adds_nothing)
_GLM4_V = replace(
    GLM4,
    model_type="glm4v_text",
    axes=(8, 12, 12),
    changes={
        **_of_heads("q_proj", "attn_q", "num_attention_heads"),
        **_of_heads("k_proj", "attn_k", "num_key_value_heads"),
    },
)
SEEING: tuple[GgufFamily, ...] = (
    _QWEN2_VL,
    replace(_QWEN2_VL, model_type="qwen2_5_vl_text"),
    replace(_QWEN2_VL, model_type="qwen2_5_omni_text"),
    replace(
        QWEN3,
        model_type="qwen3_vl_text",
        architecture="qwen3vl",
        axes=(24, 20, 20),
        has_deep_stack=True,
    ),
    _GLM4_V,
    replace(_GLM4_V, model_type="glm_ocr_text"),
    replace(ERNIE, model_type="paddleocr_vl_text", architecture="paddleocr", is_interleaved=False, axes=(16, 24, 24)),
)
