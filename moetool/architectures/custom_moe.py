"""Mixtures that moetool made of a dense family's own networks, seen as a mixture-of-experts family."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moetool.architectures.base import Architecture, MoEShape, Role, fused_name
from moetool.architectures.custom import OWN_MODULES, is_opaque, own_modules
from moetool.architectures.dense import find_dense_architecture
from moetool.errors import InvalidInputError

ROUTER = "gate.weight"
SHARED = "shared_expert"


def fused_names(roles: Sequence[Role]) -> dict[Role, str]:
    """Names of the experts' matrices, relative to the mixture. Their biases have the same, with `_bias` at the end."""
    return {role: f"experts.{fused_name(group)}" for group in (roles[:-1], roles[-1:]) for role in group}


@dataclass(frozen=True)
class OwnMixture(Architecture):
    """What the entry `mixture` of `quantization_config` says, in the words of an `Architecture`.

    Attributes:
        entry: that entry.
    """

    entry: Mapping[str, Any] = field(default_factory=dict)

    def moe_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(int(layer) for layer in self.entry["layers"])

    def numbers(self, config: Mapping[str, Any]) -> MoEShape:
        return mixture_shape(self.entry)

    def layers(self, config: Mapping[str, Any]) -> int:
        return int(self.entry["of"])


def mixture_shape(entry: Mapping[str, Any]) -> MoEShape:
    """The shape that an entry `mixture` describes. Raises `InvalidInputError` if it is not one this version writes."""
    try:
        experts, top_k, hidden, width = (int(entry[key]) for key in ("experts", "top_k", "hidden", "intermediate"))
        return MoEShape(experts, top_k, hidden, width, tuple(entry["roles"]), tuple(entry["biases"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"quantization_config: mixture cannot be read: {error!r}. Another moetool has written it: upcycle "
            "the dense model again."
        ) from error


def mixture_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry `mixture` of a config, `None` for any other model."""
    return own_modules(config).get("mixture")


def own_mixture(config: Mapping[str, Any]) -> OwnMixture:
    """The family of a mixture that moetool made of a model's own networks.

    Raises:
        InvalidInputError: its experts are no feed-forward networks.
    """
    entry = mixture_of(config) or {}
    dense = find_dense_architecture({**config, "quantization_config": None})
    if is_opaque(config):
        reason = OWN_MODULES[next(iter(own_modules(config)))].what
        raise InvalidInputError(
            f"This ({config.get('model_type')}) is {reason}. transformers and moetool's eval, tune, inspect and verify "
            "take it; compression and export to experts do not."
        )
    weights = fused_names(dense.roles)
    biases = {f"{weights[role]}_bias" for role in mixture_shape(entry).biases}
    return OwnMixture(
        name=f"{dense.name} (moetool's MoE layers)",
        model_types=(),
        reference=dense.reference,
        experts_key="",
        intermediate_key="",
        router_rule="softmax over all experts, top-k, renormalized",
        layer=dense.layer,
        block=dense.ffn,
        weights=weights,
        router=ROUTER,
        experts_module=f"{dense.ffn}.experts",
        returns_tuple=dense.returns_tuple,
        others=(f"{SHARED}.", *sorted(biases), dense.weights["up"]),
        shared_expert_module=f"{dense.ffn}.{SHARED}" if entry.get("shared", "none") != "none" else "",
        shared_expert=dense.weights,
        entry=entry,
    )
