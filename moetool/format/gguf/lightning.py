"""The family with lightning attention: sums of keys and values that decay from token to token, in llama.cpp.

Source: https://github.com/ggml-org/llama.cpp (`conversion/minimax.py`, `src/models/minimax-01.cpp`).
"""

from typing import TYPE_CHECKING

from moetool.format.gguf.family import GgufFamily
from moetool.format.gguf.routing import FIXED_EPSILON, told_epsilon

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LARGEST_EPSILON = 1e-5  # of published models, for which vLLM has it there, too
_KINDS = "full_attn", "linear_attn", "mlp"


def _other_minimax(config: "PreTrainedConfig") -> str | None:
    if len({getattr(config, f"{kind}_alpha_factor") for kind in _KINDS}) > 1:
        return "it multiplies every residual by the same number (full_attn_alpha_factor and others)"
    if any(getattr(config, f"{kind}_beta_factor") != 1 for kind in _KINDS):
        return "it adds attention and experts as they are (full_attn_beta_factor and others)"
    if len(set(config.layer_types)) != 2:
        return "some of its layers have lightning attention and some do not (layer_types)"
    if config.rms_norm_eps > _LARGEST_EPSILON:
        return f"rms_norm_eps is in its norm behind lightning attention, too, where transformers has {FIXED_EPSILON:g}"
    width = config.head_dim or config.hidden_size // config.num_attention_heads
    if getattr(config, "rotary_dim", width) not in (None, width):
        return (
            f"rotary_dim says that rotary embeddings turn {config.rotary_dim} channels of a head, and transformers, by "
            f"which moetool computes, turns all {width}"
        )
    return None


LIGHTNING: tuple[GgufFamily, ...] = (
    GgufFamily(
        "minimax",
        "minimax-01",
        is_moe=True,
        has_states=True,
        names={
            "self_attn.qkv_proj.weight": "attn_qkv.weight",
            "self_attn.output_gate.weight": "attn_gate.weight",
            "self_attn.norm.weight": "attn_norm_2.weight",
            "self_attn.out_proj.weight": "attn_output.weight",
        },
        multipliers={"full_attn_alpha_factor": "residual_scale"},
        computes={"sliding_window": (None,)},
        objection=_other_minimax,
        remark=told_epsilon(
            "llama.cpp's norm behind lightning attention adds {eps:g} to the mean square, transformers' "
            f"{FIXED_EPSILON:g}: logits differ slightly."
        ),
    ),
)
