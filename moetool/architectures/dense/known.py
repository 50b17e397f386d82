"""Facts about dense families that no module tells: which MoE families on the hub can hold their layers, and which of
them are encoders."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KnownDense:
    """Facts about one dense family, by its model type, that its modules do not tell.

    Attributes:
        features: what its layers do beyond a plain Llama's, by the names of `FEATURES`.
        optional_features: those that a config key turns on, by that key.
        norm_offset: what its norms add to their weights.
        joined_qkv: the tensor that holds queries, keys and values one below the other, relative to the layer.
    """

    features: tuple[str, ...] = ()
    optional_features: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    joined_qkv: str | None = None


_ATTENTION = {"attention_bias": "attention_bias"}
_BOTH = _ATTENTION | {"mlp_bias": "mlp_bias"}

# Families whose layers some MoE family on the hub has too. Those of every other are their own.
KNOWN_DENSE: Mapping[str, KnownDense] = {
    "gemma": KnownDense(("scaled_embedding",), _ATTENTION, norm_offset=1.0),
    "granite": KnownDense(("multipliers",), _BOTH),
    "llama": KnownDense((), _BOTH),
    "mistral": KnownDense(),
    "olmo2": KnownDense(("query_norm",), _ATTENTION),
    "phi3": KnownDense(joined_qkv="self_attn.qkv_proj.weight"),
    "qwen2": KnownDense(("qkv_bias",)),
    "qwen3": KnownDense(("head_norm",), _ATTENTION),
    "seed_oss": KnownDense(
        (), {"attention_bias": "qkv_bias", "attention_out_bias": "own_block", "mlp_bias": "mlp_bias"}
    ),
}
OTHER_DENSE = KnownDense(("own_block",))

# Families of which the numbers in `config.json` are checked one by one, before transformers reads them.
CHECKED = frozenset(
    {*KNOWN_DENSE, "bert", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma2", "gemma3_text", "glm", "glm4"}
    | {"gpt_bigcode", "gpt_neox", "hunyuan_v1_dense", "olmo", "olmo3", "opt", "phi", "smollm3", "starcoder2"}
)

# Families that fill in hidden words, of which every token sees all others.
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert", "deberta", "deberta-v2", "electra", "distilbert")


def is_encoder(config: Mapping[str, object]) -> bool:
    """Whether a `config.json` is that of a model that fills in hidden words, of a family that moetool takes."""
    return config.get("model_type") in ENCODERS and not config.get("is_decoder")
