"""Mixtures that moetool made of a dense family's own gated networks, seen as a mixture-of-experts family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moetool.architectures.base import Architecture, MoEShape, Role
from moetool.architectures.dense import find_dense_architecture
from moetool.errors import InvalidInputError

# Kinds of modules of moetool's own, by the entry that describes them, and what an error message says of them.
OWN_MODULES: Mapping[str, str] = {
    "mixture": "a mixture of feed-forward networks without gates or with biases, as no mixture-of-experts family has",
    "adapter_experts": "a model whose experts are adapters (PESC), which are no feed-forward networks",
    "interpolated": "a model whose experts are masks on its own weights (SIMoE)",
    "neuron_experts": "a moefied model, whose experts are the neurons of its own feed-forward networks",
}
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


def own_modules(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What moetool's modules stand for in a model, by entry of its `quantization_config`; empty for any other."""
    entry = config.get("quantization_config")
    if not isinstance(entry, Mapping):
        return {}
    return {kind: entry[kind] for kind in OWN_MODULES if isinstance(entry.get(kind), Mapping)}


def is_opaque(config: Mapping[str, Any]) -> bool:
    """Whether a model has modules of moetool's own that are no mixture of gated experts, as all families know it."""
    return any(kind != "mixture" or not entry.get("fused") for kind, entry in own_modules(config).items())


def own_mixture(config: Mapping[str, Any]) -> OwnMixture:
    """The family of a mixture that moetool made of a model's own networks.

    Raises:
        InvalidInputError: these have no gate or have biases, so that they are modules of their own class.
    """
    entry = mixture_of(config) or {}
    dense = find_dense_architecture({**config, "quantization_config": None})
    if is_opaque(config):
        reason = OWN_MODULES[next(iter(own_modules(config)))]
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
