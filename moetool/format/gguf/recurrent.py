"""Families with layers that carry a state from token to token in the place of attention, as llama.cpp computes them.

Sources: https://github.com/ggml-org/llama.cpp (`conversion/granite.py`, `conversion/mamba.py`, `conversion/jamba.py`,
`conversion/nemotron.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from moetool.format.gguf.changes import Change, Config, Recast, changed, gate_and_up, head_norms, whole_numbers
from moetool.format.gguf.delta_rules import DELTA_RULES, decay, logarithm, without_middle
from moetool.format.gguf.dense import GRANITE_DENSE
from moetool.format.gguf.family import ATTENTION, GgufFamily, beside, without_experts
from moetool.format.gguf.routing import (
    ALL_BIASES,
    GRANITE,
    IF_RENORMALIZED,
    N_SHARED,
    NOT_SCALED,
    RENORMALIZED,
    SCALED,
    SIGMOID,
)
from moetool.format.gguf.words import EXPERT_WIDTH

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _column(there: Recast, back: Recast) -> tuple[Recast, Recast]:
    """A change and its way back, of numbers `[numbers]` that a file has below each other, `[numbers, 1]`."""
    return (
        lambda config, given: there(config, given).unsqueeze(-1),
        lambda config, given: back(config, given.squeeze(-1)),
    )


def _as_it_is(_: Config, given: Tensor) -> Tensor:
    return given


def _grouped_norm(groups: str) -> Change:
    """The norm of a Mamba-2 layer, `[channels]`, which a file has as `[groups, channels / groups]`; `groups` is their
    entry in the config."""
    return changed(
        "ssm_norm.weight",
        lambda config, given: given.unflatten(0, (whole_numbers(config, groups)[0], -1)),
        lambda _, given: given.flatten(),
    )


def _mamba(module: str) -> Mapping[str, str]:
    """Names of tensors that Mamba layers of both versions have."""
    return {
        f"{module}.in_proj.weight": "ssm_in.weight",
        f"{module}.out_proj.weight": "ssm_out.weight",
        f"{module}.conv1d.bias": "ssm_conv1d.bias",
    }


def mamba2(module: str, groups: str) -> tuple[Mapping[str, str], Mapping[str, Change]]:
    """Names and changes of the tensors of a Mamba-2 layer, which are in this module of it."""
    names = {**_mamba(module), f"{module}.dt_bias": "ssm_dt.bias"}
    changes = {
        f"{module}.A_log": changed("ssm_a", *_column(decay, logarithm)),
        f"{module}.D": changed("ssm_d", *_column(_as_it_is, _as_it_is)),
        f"{module}.conv1d.weight": without_middle("ssm_conv1d.weight"),
        f"{module}.norm.weight": _grouped_norm(groups),
    }
    return names, changes


MAMBA2_COUNTS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}


def _expanded(config: Config) -> int:
    """How many times as wide as the model a Mamba layer is."""
    heads, width, hidden = whole_numbers(config, "mamba_n_heads", "mamba_d_head", "hidden_size")
    return heads * width // hidden


_GRANITE_NAMES, _GRANITE_CHANGES = mamba2("mamba", "mamba_n_groups")
_GRANITE_HYBRID = GgufFamily(
    "granitemoehybrid",
    "granitehybrid",
    is_moe=True,
    is_interleaved=True,
    slows_rope=True,
    has_shared=True,
    may_lack_shared=True,
    varies_heads=True,
    kinds_by_heads=("mamba", "attention"),
    biases=ALL_BIASES,
    shared_width="shared_intermediate_size",
    names=_GRANITE_NAMES,
    changes=_GRANITE_CHANGES,
    counts=MAMBA2_COUNTS,
    multipliers=GRANITE,
    products={"ssm.inner_size": ("mamba_n_heads", "mamba_d_head")},
    computes={"mamba_conv_bias": (True,), "time_step_limit": ((0.0, math.inf),)},
    implied={"mamba_expand": _expanded},
    choices={"position_embedding_type": ("rope.scaling.finetuned", {"rope": True, "nope": False, None: False})},
)
# Granite 4 without experts, whose feed-forward network is what a shared expert is beside others.
_WITHOUT_OTHERS = {"shared_mlp.output_linear.weight": "ffn_down.weight"}
_JOINED = {"shared_mlp.input_linear.weight": gate_and_up("ffn_gate.weight", "ffn_up.weight")}
_GRANITE_HYBRID_DENSE = replace(
    _GRANITE_HYBRID,
    is_moe=False,
    has_shared=False,
    shared_width=None,
    dense_width="shared_intermediate_size",
    dense=_WITHOUT_OTHERS,
    changes={**_GRANITE_CHANGES, **_JOINED},
    implied={**_GRANITE_HYBRID.implied, "num_local_experts": lambda _: 0},
)
# Without Mamba layers, too, it is an ordinary Granite.
GRANITE_4_DENSE = replace(
    GRANITE_DENSE,
    model_type="granitemoehybrid",
    dense=_WITHOUT_OTHERS,
    changes=_JOINED,
    computes={"position_embedding_type": ("rope",)},
)
_JAMBA = GgufFamily(
    "jamba",
    "jamba",
    is_moe=True,
    mixes_layers=True,
    varies_heads=True,
    experts_key="num_experts",
    names={
        "pre_ff_layernorm.weight": "ffn_norm.weight",
        **_mamba("mamba"),
        "mamba.x_proj.weight": "ssm_x.weight",
        "mamba.dt_proj.weight": "ssm_dt.weight",
        "mamba.dt_proj.bias": "ssm_dt.bias",
        "mamba.D": "ssm_d",
        **{f"mamba.{one}_layernorm.weight": f"ssm_{one}_norm.weight" for one in ("dt", "b", "c")},
    },
    outside={"model.norm.weight": "", "model.final_layernorm.weight": "output_norm.weight"},
    dense=without_experts("feed_forward"),
    changes={
        "mamba.A_log": changed("ssm_a", decay, logarithm),
        "mamba.conv1d.weight": without_middle("ssm_conv1d.weight"),
    },
    counts={
        "mamba_d_conv": "ssm.conv_kernel",
        "mamba_d_state": "ssm.state_size",
        "mamba_dt_rank": "ssm.time_step_rank",
    },
    products={"ssm.inner_size": ("mamba_expand", "hidden_size")},
    computes={"mamba_conv_bias": (True,), "mamba_expand": (2,)},
)
_NEMOTRON_NAMES, _NEMOTRON_CHANGES = mamba2("mixer", "n_groups")


def _least_step(config: "PreTrainedConfig") -> str | None:
    if not (least := config.time_step_min):
        return None
    return f"llama.cpp lets time steps be less than time_step_min = {least}, transformers does not: logits may differ."


_NEMOTRON_H = GgufFamily(
    "nemotron_h",
    "nemotron_h_moe",
    is_moe=True,
    may_tie=False,
    mixes_layers=True,
    remark=_least_step,
    varies_heads=True,
    skips_experts=True,
    experts_key="n_routed_experts",
    width_key=EXPERT_WIDTH,
    shared_width="moe_shared_expert_intermediate_size",
    names={
        **_NEMOTRON_NAMES,
        "norm.weight": "attn_norm.weight",
        **beside("mixer.shared_experts"),
        "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
        "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
        **{f"mixer.{module}.weight": f"{own}.weight" for module, own in ATTENTION.items()},
    },
    outside={
        **dict.fromkeys(("model.embed_tokens.weight", "model.norm.weight"), ""),
        "model.embeddings.weight": "token_embd.weight",
        "model.norm_f.weight": "output_norm.weight",
    },
    changes=_NEMOTRON_CHANGES,
    counts={
        **N_SHARED,
        "conv_kernel": "ssm.conv_kernel",
        "ssm_state_size": "ssm.state_size",
        "n_groups": "ssm.group_count",
        "mamba_num_heads": "ssm.time_step_rank",
        "moe_latent_size": "moe_latent_size",
    },
    multipliers={"layer_norm_epsilon": "attention.layer_norm_epsilon", **SCALED},
    flags=IF_RENORMALIZED,
    products={"ssm.inner_size": ("mamba_num_heads", "mamba_head_dim")},
    fixed=SIGMOID,
    computes={
        "mlp_hidden_act": ("relu2",),
        "use_conv_bias": (True,),
        "use_bias": (False,),
        "mlp_bias": (False,),
    },
)
_NEMOTRON_H_DENSE = replace(
    _NEMOTRON_H,
    architecture="nemotron_h",
    is_moe=False,
    shared_width=None,
    layer="backbone.layers.{layer}",
    outside={
        **dict.fromkeys(("model.embed_tokens.weight", "model.norm.weight"), ""),
        "backbone.embeddings.weight": "token_embd.weight",
        "backbone.norm_f.weight": "output_norm.weight",
    },
    dense={f"mixer.{role}_proj.weight": f"ffn_{role}.weight" for role in ("up", "down")},
    counts={key: own for key, own in _NEMOTRON_H.counts.items() if key not in {*N_SHARED, "moe_latent_size"}},
    multipliers={"layer_norm_epsilon": "attention.layer_norm_epsilon"},
    flags={},
    fixed={},
)
_BY_NUMBER = ((1, "gate"), (2, "down"), (3, "up"))
_LFM2_MOE = GgufFamily(
    "lfm2_moe",
    "lfm2moe",
    is_moe=True,
    is_square=True,
    leads_dense=True,
    experts_key="num_experts",
    width_key=EXPERT_WIDTH,
    names={
        "operator_norm.weight": "attn_norm.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        "self_attn.out_proj.weight": "attn_output.weight",
        **head_norms("q_layernorm", "k_layernorm"),
        "conv.in_proj.weight": "shortconv.in_proj.weight",
        "conv.out_proj.weight": "shortconv.out_proj.weight",
    },
    outside={"model.norm.weight": "", "model.embedding_norm.weight": "token_embd_norm.weight"},
    dense={f"feed_forward.w{index}.weight": f"ffn_{role}.weight" for index, role in _BY_NUMBER},
    changes={"conv.conv.weight": without_middle("shortconv.conv.weight")},
    counts={"conv_L_cache": "shortconv.l_cache"},
    multipliers={"norm_eps": "attention.layer_norm_rms_epsilon"},
    fixed=SIGMOID,
    computes={**RENORMALIZED, **NOT_SCALED, "use_expert_bias": (True,), "conv_bias": (False,)},
    varies_heads=True,
    kinds_by_heads=("conv", "full_attention"),
    cutting="lfm2",
)
_LFM2 = replace(
    _LFM2_MOE,
    model_type="lfm2",
    architecture="lfm2",
    is_moe=False,
    fixed={},
    computes={"conv_bias": (False,)},
    implied={"block_auto_adjust_ff_dim": lambda _: False},
)
RECURRENT: tuple[GgufFamily, ...] = (
    _LFM2_MOE,
    _LFM2,
    *DELTA_RULES,
    _GRANITE_HYBRID,
    _GRANITE_HYBRID_DENSE,
    _JAMBA,
    replace(_JAMBA, is_moe=False, implied={"num_experts": lambda _: 1}),
    _NEMOTRON_H,
    _NEMOTRON_H_DENSE,
)
