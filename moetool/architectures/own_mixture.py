"""Mixtures that moetool made of a dense family's own gated networks, seen as a mixture-of-experts family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moetool.architectures.base import Architecture, MoEShape, Role
from moetool.architectures.dense import find_dense_architecture
from moetool.architectures.own_modules import OWN_MODULES, is_opaque, own_modules
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


def own_mixture(config: Mapping[str, Any]) -> OwnMixture:
    """The family of a mixture that moetool made of a model's own networks.

    Raises:
        InvalidInputError: these have no gate or have biases, so that they are modules of their own class.
    """
    entry = mixture_of(config) or {}
    dense = find_dense_architecture({**config, "quantization_config": None})
    if is_opaque(config):
        reason = OWN_MODULES[next(iter(own_modules(config)))].what
        raise InvalidInputError(
            f"This ({config.get('model_type')}) is {reason}. transformers and moetool's eval, tune, inspect and verify "
            "take it; compression and export to experts do not."
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
