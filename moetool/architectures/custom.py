"""Modules of moetool's own that a model may have, by the entries of its `quantization_config` that describe them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

METHOD = "moetool"  # `quant_method` of every entry of moetool's


class OwnKind(NamedTuple):
    """What error messages say of a model with such modules: what it is, and what happened to it.

    A `mixture` is one of whole feed-forward networks, as all families know it.
    """

    what: str
    made: str


OWN_MODULES: Mapping[str, OwnKind] = {
    "mixture": OwnKind(
        "an MoE model made of a dense model's feed-forward networks",
        "is an MoE model already: moetool upcycled it",
    ),
    "adapter_experts": OwnKind(
        "a model whose experts are adapters (PESC), which are no feed-forward networks",
        "has experts already: adapters, by PESC",
    ),
    "interpolated": OwnKind(
        "a model whose experts are masks on its own weights (SIMoE)",
        "has experts already: masks, by SIMoE",
    ),
    "neuron_experts": OwnKind(
        "a moefied model, whose experts are the neurons of its own feed-forward networks",
        "is moefied already; `eval --keep` and moetool.set_keep change how many experts are used",
    ),
}


def moetool_entry(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config` of a moetool checkpoint, `None` for any other."""
    entry = config.get("quantization_config")
    if isinstance(entry, Mapping) and entry.get("quant_method") == METHOD:
        return entry
    return None


def own_modules(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What moetool's modules stand for in a model, by entry of its `quantization_config`; empty for any other."""
    entry = moetool_entry(config) or {}
    return {kind: entry[kind] for kind in OWN_MODULES if isinstance(entry.get(kind), Mapping)}


def is_opaque(config: Mapping[str, Any]) -> bool:
    """Whether a model has modules of moetool's own that are no mixture of whole feed-forward networks."""
    return any(kind != "mixture" for kind in own_modules(config))
