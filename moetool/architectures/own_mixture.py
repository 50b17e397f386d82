"""Mixtures that moetool made of a dense family's own gated networks, seen as a mixture-of-experts family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moetool.architectures.base import Architecture, MoEShape, Role
from moetool.architectures.dense import find_dense_architecture
from moetool.errors import InvalidInputError

FUSED: Mapping[Role, str] = {
    "gate": "experts.gate_up_proj",
    "up": "experts.gate_up_proj",
    "down": "experts.down_proj",
}
ROUTER = "gate.weight"
SHARED = "shared_expert."


@dataclass(frozen=True)
class OwnMixture(Architecture):
    """What the entry `mixture` of `quantization_config` says, in the words of an `Architecture`.

    Attributes:
        entry: that entry.
    """

    entry: Mapping[str, Any] = field(default_factory=dict)

    def moe_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(int(layer) for layer in self.entry["layers"])

    def shape(self, config: Mapping[str, Any]) -> MoEShape:
        experts, top_k, width = (int(self.entry[key]) for key in ("experts", "top_k", "intermediate"))
        return MoEShape(experts, top_k, self.number(config, "hidden_size"), width)


def mixture_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry `mixture` of a config, `None` for any other model."""
    entry = config.get("quantization_config")
    return entry.get("mixture") if isinstance(entry, Mapping) else None


def is_separate(config: Mapping[str, Any]) -> bool:
    """Whether a model is a mixture whose experts are modules of their own, of which only the fewest tools know."""
    entry = mixture_of(config)
    return entry is not None and not entry.get("fused")


def own_mixture(config: Mapping[str, Any]) -> OwnMixture:
    """The family of a mixture that moetool made of a model's own networks.

    Raises:
        InvalidInputError: these have no gate or have biases, so that they are modules of their own class.
    """
    entry = mixture_of(config) or {}
    dense = find_dense_architecture({**config, "quantization_config": None})
    if is_separate(config):
        raise InvalidInputError(
            f"This model ({config.get('model_type')}) is a mixture of feed-forward networks without gates or with "
            "biases, which no mixture-of-experts family has. transformers and moetool's eval, inspect, verify and "
            "`export --format dense` take it; compression does not."
        )
    return OwnMixture(
        name=f"{dense.name} (moetool's mixture)",
        model_types=(),
        reference=dense.reference,
        experts_key="",
        intermediate_key="",
        router_rule="softmax over all experts, top-k, renormalised",
        layer=dense.layer,
        block=dense.ffn,
        weights=FUSED,
        router=ROUTER,
        experts_module=f"{dense.ffn}.experts",
        others=(SHARED, dense.weights["up"]),
        entry=entry,
    )
