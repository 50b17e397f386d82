"""Families with layers of gated delta rules, and Kimi's delta attention, as llama.cpp computes them.

Sources: https://github.com/ggml-org/llama.cpp (`conversion/qwen.py`, `conversion/kimi_linear.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.format.gguf.changes import Change, Config, Recast, changed, norms_plus_one, whole_numbers
from moetool.format.gguf.family import GgufFamily
from moetool.format.gguf.routing import RENORMALIZED
from moetool.format.gguf.words import EXPERT_WIDTH

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_AXES = 11, 11, 10


def _turned(name: str, there: Recast, back: Recast) -> Change:
    """A change that only puts a tensor's rows in another order."""
    return replace(changed(name, there, back), keeps_inputs=True)


def without_middle(name: str) -> Change:
    """Kernels `[channels, 1, width]` of a convolution, which a file has as `[channels, width]`."""
    return changed(name, lambda _, given: given.squeeze(1), lambda _, given: given.unsqueeze(1))


def decay(_: Config, logarithm: Tensor) -> Tensor:
    """The decay rates of a state, negative, of which a checkpoint has the logarithm (`A_log`)."""
    return -logarithm.float().exp()


def logarithm(_: Config, decay: Tensor) -> Tensor:
    """The logarithm of a state's decay rates (`A_log`), from the negative rates that a file has."""
    return (-decay).log()


# Of Kimi's delta attention (KDA), in a layer: tensors, and the decay of its states.
KDA_NAMES: Mapping[str, str] = {
    **{f"self_attn.{one}_conv1d.weight": f"ssm_conv1d_{one}.weight" for one in ("q", "k", "v")},
    **{f"self_attn.{one}_proj.weight": f"ssm_{one}.weight" for one in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.o_norm.weight": "ssm_norm.weight",
}
KDA_MODULES: Mapping[str, str] = {"self_attn.f_": "self_attn.forget_gate.f_"}
KDA_CHANGES: Mapping[str, Change] = {"self_attn.A_log": changed("ssm_a", decay, logarithm)}


def _heads(config: Config) -> tuple[int, int, int, int]:
    """Of gated delta rules: heads of keys, heads of values for each, and the widths of both."""
    keys, values, wide, own = whole_numbers(
        config, "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
    )
    return keys, values // keys, wide, own


def _taken_apart(config: Config, joined: Tensor) -> list[Tensor]:
    """Rows of queries, keys, values and gates, head by head, as all queries, keys and values, and as all gates."""
    keys, each, wide, own = _heads(config)
    by_head = joined.unflatten(0, (keys, -1)).split([wide, wide, each * own, each * own], dim=1)
    queries, turned, values, gates = (part.flatten(0, 1) for part in by_head)
    return [torch.cat([queries, turned, values]), gates]


def _put_together(config: Config, parts: Sequence[Tensor]) -> Tensor:
    """Rows of queries, keys, values and gates in one matrix, head by head, as a checkpoint has them."""
    keys, each, wide, own = _heads(config)
    rows, gates = parts
    all_of = rows.split([keys * wide, keys * wide, keys * each * own])
    return torch.cat([part.unflatten(0, (keys, -1)) for part in (*all_of, gates)], dim=1).flatten(0, 1)


def _tiled(config: Config, given: Tensor, dimension: int = 0, *, back: bool = False) -> Tensor:
    """Order heads of values as the first of every head of keys, then the second of each, and so on; a checkpoint has
    all heads of values of one head of keys together. `back` undoes it."""
    keys, each, _, _ = _heads(config)
    sizes = (each, keys, -1) if back else (keys, each, -1)
    whole = given.unflatten(dimension, sizes).transpose(dimension, dimension + 1)
    return whole.flatten(dimension, dimension + 2)


def _last_tiled(config: Config, given: Tensor, *, back: bool = False) -> Tensor:
    """Order the heads of values as `_tiled` does, in rows of which those of queries and keys come first."""
    keys, _, wide, _ = _heads(config)
    first = 2 * keys * wide
    return torch.cat([given[:first], _tiled(config, given[first:], back=back)])


def _other_delta_rule(config: "PreTrainedConfig") -> str | None:
    if config.linear_value_head_dim != config.linear_key_head_dim:
        return "in layers with a state it has heads of values as wide as those of keys (linear_value_head_dim)"
    if config.rms_norm_eps != 1e-6:
        return f"it norms what enters a state with rms_norm_eps = {config.rms_norm_eps}, transformers with 1e-06"
    axes = config.rope_parameters.get("mrope_section") or _AXES
    if any(pair >= 3 * axes[pair % 3] for pair in range(sum(axes))):
        return f"it turns no pair of channels by time that is no third one (mrope_section = {list(axes)})"
    return None


_back = partial(partial, back=True)
_NORMS_PLUS_ONE = norms_plus_one("post_attention_norm.weight")
_QWEN3_NEXT = GgufFamily(
    "qwen3_next",
    "qwen3next",
    is_moe=True,
    is_partial=True,
    has_shared=True,
    experts_key="num_experts",
    width_key=EXPERT_WIDTH,
    shared_width="shared_expert_intermediate_size",
    attention_interval="full_attention_interval",
    names={
        "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.norm.weight": "ssm_norm.weight",
        "linear_attn.out_proj.weight": "ssm_out.weight",
    },
    changes={
        **_NORMS_PLUS_ONE,
        "linear_attn.A_log": changed("ssm_a", decay, logarithm),
        "linear_attn.conv1d.weight": without_middle("ssm_conv1d.weight"),
        "linear_attn.in_proj_qkvz.weight": Change(
            ("attn_qkv.weight", "attn_gate.weight"), _taken_apart, _put_together, keeps_inputs=True
        ),
    },
    counts={
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
    },
    products={"ssm.inner_size": ("linear_value_head_dim", "linear_num_value_heads")},
    computes=RENORMALIZED,
    objection=_other_delta_rule,
)
QWEN3_5_MOE = replace(
    _QWEN3_NEXT,
    model_type="qwen3_5_moe_text",
    architecture="qwen35moe",
    names={"linear_attn.norm.weight": "ssm_norm.weight"},
    changes={
        **_NORMS_PLUS_ONE,
        "linear_attn.A_log": changed(
            "ssm_a",
            lambda config, given: _tiled(config, decay(config, given)),
            lambda config, given: logarithm(config, _tiled(config, given, back=True)),
        ),
        "linear_attn.dt_bias": changed("ssm_dt.bias", _tiled, _back(_tiled)),
        "linear_attn.in_proj_qkv.weight": _turned("attn_qkv.weight", _last_tiled, _back(_last_tiled)),
        "linear_attn.in_proj_z.weight": _turned("attn_gate.weight", _tiled, _back(_tiled)),
        "linear_attn.in_proj_a.weight": _turned("ssm_alpha.weight", _tiled, _back(_tiled)),
        "linear_attn.in_proj_b.weight": _turned("ssm_beta.weight", _tiled, _back(_tiled)),
        "linear_attn.conv1d.weight": changed(
            "ssm_conv1d.weight",
            lambda config, given: _last_tiled(config, given.squeeze(1)),
            lambda config, given: _last_tiled(config, given, back=True).unsqueeze(1),
        ),
        "linear_attn.out_proj.weight": changed(
            "ssm_out.weight", partial(_tiled, dimension=1), partial(_tiled, dimension=1, back=True)
        ),
    },
    cutting="qwen35",
    axes=_AXES,
    computes={},
)
_QWEN3_5 = replace(QWEN3_5_MOE, model_type="qwen3_5_text", architecture="qwen35", is_moe=False)
DELTA_RULES: tuple[GgufFamily, ...] = _QWEN3_NEXT, QWEN3_5_MOE, _QWEN3_5
