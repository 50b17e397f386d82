"""The family that a `config.json` belongs to, custom modules included."""

from collections.abc import Mapping

from moetool.architectures import find_architecture
from moetool.architectures.base import Architecture
from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.errors import InvalidInputError
from moetool.format.kinds import custom_module
from moetool.format.kinds.moe import ROUTER, SHARED, MoESpec, fused_names


def architecture_of(config: Mapping[str, object]) -> Architecture:
    """The MoE family of a model: one of the hub's, or what moetool made of a dense model's own networks.

    Raises:
        InvalidInputError: the model is dense, its family is not known or known not to fit, or its experts are no
            feed-forward networks.
    """
    spec = custom_module(config)
    if spec is None:
        return find_architecture(config)
    dense = find_dense_architecture(config)
    if isinstance(spec, MoESpec):
        return _custom_moe(dense, spec)
    raise InvalidInputError(
        f"This checkpoint ({config.get('model_type')}) is {spec.what}. transformers and moetool's {spec.commands} "
        "take it; commands that store or remove experts do not."
    )


def dense_architecture_of(config: Mapping[str, object], *, may_lie_within: bool = False) -> DenseArchitecture:
    """The family of a dense model; with `may_lie_within` also of one that is the language model in another.

    Raises:
        InvalidInputError: the model has experts already, encodes only, or its family is not known.
    """
    if (spec := custom_module(config)) is not None:
        raise InvalidInputError(
            f"This model ({config.get('model_type')}) {spec.made}. Start from the dense model that it was made of."
        )
    return find_dense_architecture(config, may_lie_within=may_lie_within)


def is_opaque(config: Mapping[str, object]) -> bool:
    """Whether a model has custom modules whose experts are no whole feed-forward networks."""
    spec = custom_module(config)
    return spec is not None and not isinstance(spec, MoESpec)


def _custom_moe(dense: DenseArchitecture, spec: MoESpec) -> Architecture:
    """An MoE model that moetool made of a dense family's own networks, in the words of an `Architecture`."""
    weights = fused_names(dense.roles)
    biases = {f"{weights[role]}_bias" for role in spec.biases}
    return Architecture(
        name=f"{dense.name} ({spec.title})",
        router_rule=spec.rule,
        layers=spec.of,
        moe_layers=spec.layers,
        shape=spec.shape,
        layer=dense.layer,
        layer_module=dense.layer_module,
        block=dense.ffn,
        weights=weights,
        router=ROUTER,
        experts_module=f"{dense.ffn}.experts",
        returns_tuple=dense.returns_tuple,
        handed_on=dense.handed_on,
        others=(f"{SHARED}.", *sorted(biases), dense.placeholder, *dense.kept),
        shared_expert_module=f"{dense.ffn}.{SHARED}" if spec.shared != "none" else "",
        shared_expert={role: f"{path}.weight" for role, path in dense.linear_paths.items()},
    )
