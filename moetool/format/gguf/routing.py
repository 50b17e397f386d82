"""What many families share: how a router weighs experts, entries and names in words of `config.json` and of GGUF."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from moetool.format.gguf.family import ATTENTION, GgufFamily
from moetool.format.gguf.words import EXPERT_WIDTH, GATING, SHARED_COUNT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Attention modules with biases, and an entry that says that none has one.
INNER_BIASES = ("q_proj", "k_proj", "v_proj")
ALL_BIASES = tuple(ATTENTION)
UNBIASED: Mapping[str, tuple[object, ...]] = {"attention_bias": (False,)}

# Weights of a token's experts: what a router computes them by, whether they add up to one, by what they are multiplied.
WEIGHTS_NORM, SCALE = "expert_weights_norm", "expert_weights_scale"
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = ({GATING: number} for number in (1, 2, 3))
SIGMOID_RENORMALIZED = {**SIGMOID, WEIGHTS_NORM: True}
RENORMALIZED: Mapping[str, tuple[object, ...]] = {"norm_topk_prob": (True,)}
NOT_RENORMALIZED: Mapping[str, tuple[object, ...]] = {"norm_topk_prob": (False,)}
IF_RENORMALIZED = {"norm_topk_prob": WEIGHTS_NORM}
SCALED = {"routed_scaling_factor": SCALE}
NOT_SCALED: Mapping[str, tuple[object, ...]] = {"routed_scaling_factor": (1.0,)}

# Entries that count shared experts.
N_SHARED = {"n_shared_experts": SHARED_COUNT}
NUM_SHARED = {"num_shared_experts": SHARED_COUNT}

GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
# What chooses the places of a text that attention sees (DeepSeek's indexer).
INDEXER_COUNTS = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
POST_ATTENTION = {"post_attention_layernorm.weight": "post_attention_norm.weight"}

# A family without names of its own yet, whose layers choose experts as DeepSeek-V3's do.
ROUTED_AS_DEEPSEEK = GgufFamily(
    "",
    "",
    is_moe=True,
    leads_dense=True,
    groups_experts=True,
    has_shared=True,
    experts_key="n_routed_experts",
    width_key=EXPERT_WIDTH,
    counts=N_SHARED,
    multipliers=SCALED,
    flags=IF_RENORMALIZED,
    fixed=SIGMOID,
)

# Added by transformers to the mean square in some norms, whatever a config says of the others.
FIXED_EPSILON = 1e-6


def told_epsilon(sentence: str) -> Callable[["PreTrainedConfig"], str | None]:
    """Make the remark of a family in which llama.cpp takes `rms_norm_eps` where transformers takes `FIXED_EPSILON`: the
    sentence, in which `{eps}` stands for the config's, where the two differ."""

    def remark(config: "PreTrainedConfig") -> str | None:
        return None if config.rms_norm_eps == FIXED_EPSILON else sentence.format(eps=config.rms_norm_eps)

    return remark


def other_scores(config: "PreTrainedConfig") -> str | None:
    """Why llama.cpp computes other scores of attention, which it does not multiply as stretched rotary embeddings may
    ask for; `None` if they are not stretched."""
    if (kind := config.rope_parameters.get("rope_type", "default")) != "default":
        return f"it does not multiply the scores of attention as rotary embeddings of the kind '{kind}' may ask for"
    return None


def other_indexer(config: "PreTrainedConfig") -> str | None:
    """Why llama.cpp, whose indexers turn queries and keys by a Hadamard matrix, computes other ones; `None` if not."""
    if config.index_head_dim < 64 or config.index_head_dim & (config.index_head_dim - 1):
        return "heads of its indexers are 64, 128, 256, … channels wide (index_head_dim)"
    return None


def own_indexers(config: "PreTrainedConfig") -> list[bool]:
    """Whether each layer points out the tokens that it looks closer at; the others take those of the last that does."""
    return [kind == "full" for kind in config.indexer_types]
