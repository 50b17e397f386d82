"""Description of a model family that upcycled models can be written as: names, config entries, and what it can
express."""

from collections.abc import Callable
from dataclasses import dataclass

from moetool.format.kinds.moe import MoESpec
from moetool.runtime.dense import DenseModel

Entries = Callable[[DenseModel, MoESpec], dict[str, object]]


@dataclass(frozen=True)
class Target:
    """One MoE family, and what a model of it can express.

    Attributes:
        name: its `model_type`.
        model_class: for `architectures` of `config.json`; empty for moetool's own module, which keeps the source's.
        entries: the entries of `config.json` that make it an MoE model of this family.
        expresses: features, by the names of `FEATURES`, that a source and an MoE model may have.
        needs: features that a source must have.
        last_resort_for: features that it expresses, but other engines do not in this family.
        shared_gate: the weight `[1, hidden]` of the shared expert's own gate, relative to the layer.
        has_idle_shared: a shared expert is there in any case; if none is wanted, one whose output is zero.
        biases: projections that always have a bias `[out]`: zeros where the source has none.
        completed_biases: the same, if queries, keys and values have one.
    """

    name: str
    model_class: str
    entries: Entries
    expresses: frozenset[str]
    needs: frozenset[str] = frozenset()
    last_resort_for: frozenset[str] = frozenset()
    shared_gate: str | None = None
    has_idle_shared: bool = False
    biases: tuple[str, ...] = ()
    completed_biases: tuple[str, ...] = ()

    @property
    def is_native(self) -> bool:
        """Whether it is a family of transformers, not moetool's own module."""
        return bool(self.model_class)

    def missing(self, features: tuple[str, ...]) -> list[str]:
        """Features that it cannot express, and (first) those it needs that are not there."""
        return [*sorted(self.needs - set(features)), *(name for name in features if name not in self.expresses)]


def positions(dense: DenseModel) -> dict[str, object]:
    """Rotary positions as transformers 5 reads them, and as everything older does, which falls back on a default theta
    of its own."""
    rope = dict(getattr(dense.config, "rope_parameters", None) or {})
    entries: dict[str, object] = {"rope_parameters": rope}
    if "rope_theta" in rope:
        entries["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if scaling.get("rope_type", "default") != "default":
        entries["rope_scaling"] = scaling
    return entries


def common(dense: DenseModel) -> dict[str, object]:
    """Config keys that all target families share, written out since families differ in their defaults."""
    config = dense.config
    return {
        "hidden_size": dense.hidden,
        "head_dim": dense.head_dim,
        "num_hidden_layers": dense.layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "hidden_act": getattr(config, "hidden_activation", None) or config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "attention_dropout": config.attention_dropout,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "output_router_logits": False,
        **positions(dense),
    }
