"""Layout on disk of the checkpoints that mlx-lm runs on Apple silicon: names, tensors and the entry of `config.json`.

A matrix [out, in] has three tensors: `weight`, unsigned codes of b bits packed into uint32 without gaps, and `scales`
and `biases` [out, in / group]; a number is code · scale + bias. Those of all experts of a layer are stacked: each of
the three has one dimension more, in front.

Source: https://github.com/ml-explore/mlx-lm (`utils.load_model`, `models/switch_layers.py`).
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from moetool.architectures import Role
from moetool.architectures.base import Settings
from moetool.errors import InvalidInputError

MLX = "mlx"
CODES, SCALES, BIASES = "weight", "scales", "biases"
AFFINE_GROUPS = (32, 64, 128)  # that its kernels take
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
# What moetool calls tensors of mlx-lm's files that others are made of: a norm that one was added to, a matrix that lies
# turned round, two whose rows are one below the other on the hub. And the entry for the model that one is a part of.
PLUS_ONE, TURNED, UPPER, LOWER, PART_OF = ".plus_one", ".turned", ".upper", ".lower", "part_of"
# Tensors of all experts of a layer, or of all of one role.
STACKED = re.compile(
    r"\.(?:switch_mlp|experts|experts\.switch_glu)\.(?P<name>gate_proj|up_proj|down_proj|fc1|fc2)\.(?P<part>weight|scales|biases|bias)$"
)
IN_PARTS = re.compile(rf"{STACKED.pattern}|\.(?:embed_q|unembed_out)\.weight$")  # of what is one tensor on the hub
# Names by `model_type`, as patterns, and what moetool has in their places: those of the hub, but for parts.
RENAMED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "exaone_moe": {r"\.mlp\.gate\.e_score": ".mlp.e_score"},
        "gpt2": {r"^model\.": "transformer.", r"\.(c_attn|c_proj|c_fc)\.(weight|scales|biases)$": rf".\1{TURNED}.\2"},
        "gpt_neox": {r"^model\.h\.": "gpt_neox.layers.", r"^model\.embed_out": "embed_out", r"^model\.": "gpt_neox."},
        "gptj": {r"^model\.": "transformer."},
        "granitemoehybrid": {
            r"\.mlp\.gate_proj\.": f".shared_mlp.input_linear{UPPER}.",
            r"\.mlp\.up_proj\.": f".shared_mlp.input_linear{LOWER}.",
            r"\.mlp\.down_proj\.": ".shared_mlp.output_linear.",
        },
        "kimi_linear": {
            r"\.mlp\.e_score": ".block_sparse_moe.gate.e_score",
            r"\.mlp\.": ".block_sparse_moe.",
            r"\.([qkv])_conv\.conv\.": r".\1_conv1d.",
        },
        "laguna": {r"\.mlp\.gate\.e_score": ".mlp.experts.e_score", r"\.mlp\.gate\.proj\.": ".mlp.gate."},
        "lfm2_moe": {
            r"\.feed_forward\.gate_proj\.": ".feed_forward.w1.",
            r"\.feed_forward\.down_proj\.": ".feed_forward.w2.",
            r"\.feed_forward\.up_proj\.": ".feed_forward.w3.",
        },
        "minimax_m3_vl_text": {
            r"\.block_sparse_moe\.e_score": ".mlp.gate.e_score",
            r"\.block_sparse_moe\.shared_experts\.gate_proj\.": f".mlp.shared_experts.gate_up_proj{UPPER}.",
            r"\.block_sparse_moe\.shared_experts\.up_proj\.": f".mlp.shared_experts.gate_up_proj{LOWER}.",
            r"\.block_sparse_moe\.": ".mlp.",
        },
    }
)
# Names by `model_type`, as patterns, that the hub's have in mlx-lm, of tensors that are no experts'.
_WRITTEN_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "lfm2_moe": {
            r"\.feed_forward\.w1\.": ".feed_forward.gate_proj.",
            r"\.feed_forward\.w2\.": ".feed_forward.down_proj.",
            r"\.feed_forward\.w3\.": ".feed_forward.up_proj.",
        }
    }
)
# Norms that mlx-lm adds one to, and families that it does so in.
NORMS = re.compile(r"(\.(input_layernorm|post_attention_layernorm|q_norm|k_norm)|model\.norm)\.weight$")
ADDS_ONE = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
CONVOLUTION = re.compile(r"conv(1d|_1d)?\.weight$")  # whose single input channel lies behind the kernel
# What mlx-lm does to families whose tensors on the hub do not follow from its own, or have not been compared.
NOT_UNDONE: Mapping[str, str] = MappingProxyType(
    {
        "bailing_hybrid": "gives modules of attention other names",
        "dbrx": "cuts the matrices of all experts apart",
        "ernie4_5_moe": "leaves out the biases by which experts are chosen",
        "falcon_h1": "multiplies weights by the multipliers of the config",
        "muse_spark": "puts rows of attention's projections into another order",
        "nanochat": "gives all modules other names",
        "olmo": "takes AI2's names of modules",
        "olmo_hybrid": "gives norms other names",
    }
)
ROLE_OF: Mapping[str, Role] = MappingProxyType(
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "fc1": "up", "fc2": "down"}
)
# Families whose class in mlx-lm always has a head of its own, and the one whose class never has.
_UNTIED = frozenset(
    {
        "deepseek",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "longcat_flash",
        "phimoe",
        "qwen2_moe",
        "solar_open",
    }
)
_TIED = "lfm2_moe"
_GRANITE_LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}
_PLAIN = (str, int, float, bool, list)
_OUTRIGHT = ("rope_theta", "partial_rotary_factor")

# Where mlx-lm has the experts of a layer, beside the router, by `model_type`: of families whose exports were compared
# in mlx-lm 0.32, logit for logit.
_SWITCH, _EXPERTS = "switch_mlp", "experts"
EXPERTS_IN: Mapping[str, str] = MappingProxyType(
    {
        "afmoe": _EXPERTS,
        "deepseek": _SWITCH,
        "deepseek_v2": _SWITCH,
        "deepseek_v3": _SWITCH,
        "dots1": _EXPERTS,
        "exaone_moe": _SWITCH,
        "glm4_moe": _SWITCH,
        "gpt_oss": _EXPERTS,
        "granitemoe": _SWITCH,
        "granitemoehybrid": _SWITCH,
        "lfm2_moe": _SWITCH,
        "longcat_flash": _SWITCH,
        "minimax_m2": _SWITCH,
        "mixtral": _SWITCH,
        "olmoe": _SWITCH,
        "phimoe": _SWITCH,
        "qwen2_moe": _SWITCH,
        "qwen3_moe": _SWITCH,
        "qwen3_next": _SWITCH,
        "solar_open": _SWITCH,
    }
)


def packed_tensors(
    matrix: tuple[int, int], bits: int, group: int, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of the tensors that store a matrix `[out, in]`; `dtype` is that of scales and biases."""
    rows, columns = matrix
    return {
        CODES: (torch.uint32, (rows, columns * bits // 32)),
        SCALES: (dtype, (rows, columns // group)),
        BIASES: (dtype, (rows, columns // group)),
    }


def stacked_name(block: str, kind: str, role: Role) -> str:
    """The matrix of all experts of a `block`, such as `model.layers.0.mlp.`, in a family of this `model_type`:
    `model.layers.0.mlp.switch_mlp.up_proj.weight`."""
    return f"{block}{EXPERTS_IN[kind]}.{role}_proj.{CODES}"


def stacked_biases(block: str, kind: str, role: Role) -> str:
    """The biases of all experts of a `block`, beside `stacked_name`."""
    return f"{block}{EXPERTS_IN[kind]}.{role}_proj.bias"


def written_name(kind: str, name: str) -> str:
    """The name in mlx-lm of a tensor that is no expert's, in a family of this `model_type`."""
    for old, new in _WRITTEN_NAMES.get(kind, {}).items():
        name = re.sub(old, new, name)
    return name


def is_turned_round(name: str, shape: Sequence[int]) -> bool:
    """Whether mlx-lm has the kernel `[channels, 1, length]` of a convolution as `[channels, length, 1]`."""
    return len(shape) == 3 and shape[1] == 1 and CONVOLUTION.search(name) is not None


def is_added_to(kind: str, name: str) -> bool:
    """Whether mlx-lm has a norm of a family with one added."""
    return kind in ADDS_ONE and NORMS.search(name) is not None


def packed_entry(bits: int, group: int, named: Mapping[str, int]) -> dict[str, object]:
    """What `config.json` says under `quantization`, and under `quantization_config`, where other tools look.

    Args:
        bits: of most matrices.
        group: inputs that share a scale.
        named: bits of all matrices in codes, by module.
    """
    own = {module: {"group_size": group, "bits": more} for module, more in named.items() if more != bits}
    return {"group_size": group, "bits": bits, "mode": "affine", **own}


def bits_of(entry: Mapping[str, object], module: str) -> int:
    """Bits of a module's matrix by such an entry of `config.json`; 0 if that says nothing of it."""
    own = entry.get(module, entry)
    bits = own.get("bits") if isinstance(own, Mapping) else None
    return bits if isinstance(bits, int) else 0


def told_outright(settings: Settings) -> dict[str, object]:
    """Values of `config.json` where mlx-lm looks for them: it has defaults of its own, not those of transformers, and
    most of its families know the entries on rotary embeddings of transformers 4 alone.

    Raises:
        InvalidInputError: the config says what mlx-lm has no words for.
    """
    found: dict[str, object] = {key: value for key, value in settings.items() if isinstance(value, _PLAIN)}
    rotary = settings.get("rope_parameters")
    if isinstance(rotary, Mapping) and "rope_theta" in rotary:  # else each kind of layer has its own
        found |= {key: rotary[key] for key in _OUTRIGHT if key in rotary}
        scaled = {key: value for key, value in rotary.items() if key not in _OUTRIGHT}
        found["rope_scaling"] = None if scaled.get("rope_type", "default") == "default" else scaled
    return found | _told_of(str(settings.get("model_type")), settings)


def told_of_head(kind: str, *, has_head: bool) -> dict[str, object]:
    """What `config.json` says of tying, in a family of this `model_type`: mlx-lm leaves out the head of files whose
    config says that it is tied, and transformers takes it where it differs from the embeddings.

    Raises:
        InvalidInputError: mlx-lm's class of the family has no place for a head, or none without one.
    """
    if has_head and kind == _TIED:
        raise InvalidInputError(
            "mlx-lm has no head for LFM2-MoE but its embeddings, and this model has one of its own."
        )
    if not has_head and kind in _UNTIED:
        raise InvalidInputError(
            f"mlx-lm wants a head for '{kind}', and this model has none: its embeddings are its head "
            "(tie_word_embeddings)."
        )
    return {"tie_word_embeddings": not has_head}


def _told_of(kind: str, settings: Settings) -> dict[str, object]:
    """What mlx-lm's class of a family asks for, in words of its own."""
    kinds = settings.get("layer_types")
    if kind == "granitemoehybrid" and isinstance(kinds, list):
        turned = settings.get("position_embedding_type") == "rope"
        called = [_GRANITE_LAYERS.get(own, own) for own in kinds]
        return {"layer_types": called, "position_embedding_type": "rope" if turned else "nope"}
    if kind != "qwen3_next" or not isinstance(kinds, list):
        return {}
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if any((kind == "full_attention") == bool((layer + 1) % every) for layer, kind in enumerate(kinds)):
        raise InvalidInputError(
            f"layer_types has attention in {kinds.count('full_attention')} of {len(kinds)} layers; mlx-lm has it in "
            f"every {every}th alone."
        )
    return {"full_attention_interval": every}


def is_mlx(config: Mapping[str, object]) -> bool:
    """Whether a `config.json` is of a checkpoint in codes of mlx-lm."""
    return said_by_mlx(config) is not None


def said_by_mlx(config: Mapping[str, object]) -> dict[str, object] | None:
    """What a `config.json` says of codes of mlx-lm, under `quantization` or, where other tools look, under
    `quantization_config`, named as those of other tools are; `None` if it says nothing of them."""
    for key in ("quantization_config", "quantization"):
        entry = config.get(key)
        if not isinstance(entry, Mapping) or entry.get("quant_method", MLX) != MLX:
            continue
        if {"bits", "group_size"} <= entry.keys():
            return {**entry, "quant_method": MLX}
    return None
