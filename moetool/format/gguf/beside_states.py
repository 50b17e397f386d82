"""Falcon-H1, whose layers have attention and a state of Mamba-2 side by side, as llama.cpp computes it.

llama.cpp knows none of its multipliers: a file holds matrices that are multiplied already.
Source: https://github.com/ggml-org/llama.cpp (`conversion/falcon_h1.py`, `src/models/falcon-h1.cpp`).
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.format.gguf.family import GgufFamily, without_experts
from moetool.format.gguf.recurrent import MAMBA2_COUNTS, mamba2
from moetool.format.gguf.routing import UNBIASED
from moetool.format.gguf.words import EMBEDDINGS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _into_state(config: "PreTrainedConfig") -> Tensor:
    """What multiplies each row of what enters a state: gates, values, keys, queries and time steps."""
    values, keys = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    rows = torch.tensor([values, values, keys, keys, config.mamba_n_heads])
    return config.ssm_in_multiplier * torch.tensor(config.ssm_multipliers).repeat_interleave(rows)


def _normed_first(config: "PreTrainedConfig") -> str | None:
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        return "it norms what comes out of a state behind its gate, not before (mamba_norm_before_gate)"
    return None


_NAMES, _CHANGES = mamba2("mamba", "mamba_n_groups")
FALCON_H1 = GgufFamily(
    "falcon_h1",
    "falcon-h1",
    is_moe=False,
    attends_beside_states=True,
    needs_head=True,
    names={**_NAMES, "pre_ff_layernorm.weight": "ffn_norm"},
    outside={"model.norm.weight": "", "model.final_layernorm.weight": "output_norm.weight"},
    dense=without_experts("feed_forward"),
    changes=_CHANGES,
    scaled={
        EMBEDDINGS: lambda config: config.embedding_multiplier,
        "output_norm.weight": lambda config: config.lm_head_multiplier,  # and not the head: fp32 loses nothing
        "attn_q.weight": lambda config: config.attention_in_multiplier,
        "attn_k.weight": lambda config: config.attention_in_multiplier * config.key_multiplier,
        "attn_v.weight": lambda config: config.attention_in_multiplier,
        "attn_output.weight": lambda config: config.attention_out_multiplier,
        "ssm_in.weight": _into_state,
        "ssm_out.weight": lambda config: config.ssm_out_multiplier,
        "ffn_gate.weight": lambda config: config.mlp_multipliers[0],
        "ffn_down.weight": lambda config: config.mlp_multipliers[1],
    },
    counts=MAMBA2_COUNTS,
    products={"ssm.inner_size": ("mamba_n_heads", "mamba_d_head")},
    computes={
        **UNBIASED,
        "mlp_bias": (False,),
        "projectors_bias": (False,),
        "mamba_proj_bias": (False,),
        "mamba_conv_bias": (True,),
        "time_step_limit": ((0.0, math.inf),),
    },
    objection=_normed_first,
    cutting="falcon-h1",
)
