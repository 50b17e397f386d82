"""Entries that many families share: how a router weighs experts, in words of `config.json` and of GGUF."""

from collections.abc import Mapping

from moetool.format.gguf.family import ATTENTION
from moetool.format.gguf.words import GATING

INNER_BIASES = ("q_proj", "k_proj", "v_proj")
ALL_BIASES = tuple(ATTENTION)
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = ({GATING: number} for number in (1, 2, 3))
RENORMALIZED: Mapping[str, tuple[object, ...]] = {"norm_topk_prob": (True,)}
NOT_RENORMALIZED: Mapping[str, tuple[object, ...]] = {"norm_topk_prob": (False,)}
NORM, SCALE, SHARED_COUNT = "expert_weights_norm", "expert_weights_scale", "expert_shared_count"
IF_RENORMALIZED = {"norm_topk_prob": NORM}
SCALED = {"routed_scaling_factor": SCALE}
SHARED_ONES = {"n_shared_experts": SHARED_COUNT}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
POST_ATTENTION = {"post_attention_layernorm.weight": "post_attention_norm.weight"}
