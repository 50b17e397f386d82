"""Facts about MoE families that transformers' classes do not tell: names, routing rules in words, and what is
refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moetool.errors import InvalidInputError


@dataclass(frozen=True)
class KnownFamily:
    """Facts about one MoE family that its class does not tell.

    Attributes:
        name: as people say it.
        router_rule: in words.
        computed: entries of `config.json` that would change the router's rule or the layers, and the values that
            transformers computes, which does not look at them.
        handed_on: the entry with the channels of the vector per token that a layer hands to the next beside hidden
            states, if it hands on one.
        aliases: parts of tensors' names that some tools write, and what stands there on the hub.
        layers: name of the list of decoder layers, in names of tensors.
    """

    name: str
    router_rule: str
    computed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    handed_on: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    layers: str = "layers"


_SOFTMAX = "softmax over all experts, top-k, renormalized"
_IF_ASKED = f"{_SOFTMAX} if norm_topk_prob"
_TO_ONE = f"{_SOFTMAX} to sum 1"
_LOGITS = "top-k of the logits, softmax over those k"
_GROUPS = "sigmoid, top-k of the best groups by corrected scores, renormalized, times routed_scaling_factor"

# By model type.
KNOWN: Mapping[str, KnownFamily] = {
    "afmoe": KnownFamily(
        "AFMoE",
        "sigmoid, top-k by corrected scores, renormalized to sum 1, times route_scale",
        {"score_func": ("sigmoid",), "route_norm": (True,), "n_group": (1,)},
    ),
    "dbrx": KnownFamily(
        "DBRX", f"{_SOFTMAX} to moe_normalize_expert_weights, the order of a norm, if it is not null", layers="blocks"
    ),
    "deepseek": KnownFamily("DeepSeekMoE", _IF_ASKED, {"scoring_func": ("softmax",)}),
    "deepseek_v2": KnownFamily(
        "DeepSeek-V2",
        "softmax over all experts, top-k (of the best groups), times routed_scaling_factor",
        {
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False,),
            "moe_layer_freq": (1,),
        },
    ),
    "deepseek_v3": KnownFamily(
        "DeepSeek-V3", _GROUPS, {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
    ),
    "dots1": KnownFamily("dots.llm1", _GROUPS, {"moe_layer_freq": (1,)}),
    "ernie4_5_moe": KnownFamily("ERNIE-4.5-MoE", "softmax over all experts, top-k by corrected scores, renormalized"),
    "exaone_moe": KnownFamily("EXAONE-MoE", _GROUPS, {"scoring_func": ("sigmoid",)}),
    "flex_olmo": KnownFamily("FlexOlmo", _IF_ASKED),
    "glm4_moe": KnownFamily("GLM-4-MoE", _GROUPS),
    "granitemoe": KnownFamily("Granite-MoE", _LOGITS),
    "granitemoeshared": KnownFamily("Granite-MoE-Shared", _LOGITS),
    "hunyuan_v1_moe": KnownFamily("Hunyuan-MoE", _TO_ONE),
    "jetmoe": KnownFamily("JetMoE", _LOGITS),
    "lfm2_moe": KnownFamily(
        "LFM2-MoE",
        "sigmoid, top-k by corrected scores, renormalized if norm_topk_prob, times routed_scaling_factor",
    ),
    "longcat_flash": KnownFamily(
        "LongCat-Flash",
        "softmax over all experts and those that give back what they are given, top-k by corrected scores, times "
        "routed_scaling_factor",
        {"zero_expert_type": ("identity",)},
    ),
    "minimax": KnownFamily("MiniMax", _TO_ONE),
    "minimax_m2": KnownFamily(
        "MiniMax-M2",
        "sigmoid, top-k by corrected scores, renormalized to sum 1",
        {"scoring_func": ("sigmoid",), "shared_intermediate_size": (0,)},
    ),
    "mixtral": KnownFamily(
        "Mixtral",
        _TO_ONE,
        aliases={".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."},
    ),
    "olmoe": KnownFamily("OLMoE", _IF_ASKED),
    "phimoe": KnownFamily(
        "Phi-3.5-MoE", "SparseMixer: one expert after the other, each by a softmax over the logits near the highest"
    ),
    "qwen2_moe": KnownFamily("Qwen2-MoE", _IF_ASKED),
    "qwen3_moe": KnownFamily("Qwen3-MoE", _IF_ASKED),
    "qwen3_next": KnownFamily("Qwen3-Next", _IF_ASKED),
    "solar_open": KnownFamily("Solar-Open", _GROUPS, {"first_k_dense_replace": (0,)}),
    "zaya": KnownFamily(
        "ZAYA1",
        "softmax of a small network, which is also given what that of the layer before made of the token; the best by "
        "corrected scores, or none",
        handed_on="router_hidden_size",
    ),
}

# Beginnings of tensors' names on the hub, and what transformers writes in their places when it saves, by model type.
BEGINNINGS: Mapping[str, Mapping[str, str]] = {
    "deepseek_v4": {
        "embed.": "model.embed_tokens.",
        "layers.": "model.layers.",
        "norm.": "model.norm.",
        "hc_head_": "model.hc_head.hc_",
        "mtp.": "model.mtp.",
    }
}

# Why families are refused whose classes would not tell, by model type.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("inkling2", "inkling2_text"),
        "Inkling 2 cannot be compressed: its layers attend to what layers long before them were given, and moetool "
        "runs one layer after the other on all of the text.",
    ),
    **dict.fromkeys(
        ("inkling2_loop", "inkling2_loop_text"),
        "Inkling 2 Mini cannot be compressed: a text goes through some of its layers several times, and moetool runs "
        "one layer after the other, each once.",
    ),
}


def check_refused(config: Mapping[str, object]) -> None:
    """Raise `InvalidInputError` for a family that does not fit, and for a router's rule that transformers does not
    compute for the family."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return
    if (reason := REFUSED.get(model_type)) is not None:
        raise InvalidInputError(reason)
    if (family := KNOWN.get(model_type)) is None:
        return
    for key, values in family.computed.items():
        if key in config and config[key] not in values:
            raise InvalidInputError(
                f"config.json has {key} = {config[key]!r}: this router's rule is not implemented for {family.name}, "
                f"which knows {', '.join(map(repr, values))}. Results would be wrong; refusing."
            )
