"""Layout of one MoE layer's experts: a shared base, and one representation per expert and matrix.

Gate and up form one group, down the other; each group is either left as it was (`None`), or has a base of its own, or
its experts are stored each by itself: a base of nothing, which takes no bytes, no memory and no product.
Experts without gates have up alone in the first; biases stay as they are.
Everything else follows from that: names, shapes, bytes, and the run-time module.

Names are chosen so that nothing can be loaded by mistake. A dense base takes the native name of expert 0 and is the
only one of its kind, so a reader that does not know moetool finds one expert where the config promises many and stops.
A base in any other form lies under names of its own, and a single number, the placeholder, stops such a reader in its
place.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from moetool.architectures import ROLES, MoEShape, Role
from moetool.errors import InvalidInputError
from moetool.format.kinds.base import PLACEHOLDER
from moetool.numerics.rotation import Rotation
from moetool.representations import Representation, Stored, parse_representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank

BASE_CHANNELS = "base_channels"  # indices of the intermediate channels that the stored base still has
DENSE_BASE: Mapping[Role, Representation] = dict.fromkeys(ROLES, Dense())
NO_BASE: Mapping[Role, Representation] = dict.fromkeys(ROLES, LowRank(0))  # a delta to it is the expert's own matrix


def delta_name(expert: int, role: Role, tensor: str) -> str:
    """Name of one representation's tensor, relative to the experts, on disk and in memory alike."""
    return f"moetool.{expert}.{role}.{tensor}"


def base_name(role: Role, tensor: str) -> str:
    """The name on disk of one tensor of a base that is not stored dense, relative to the experts of its layer."""
    return f"moetool.base.{role}.{tensor}"


def shared_name(role: Role, tensor: str) -> str:
    """The name of a tensor that all experts' representations have in common."""
    return f"moetool.shared.{role}.{tensor}"


@dataclass(frozen=True)
class LayerLayout:
    """Storage of one layer's experts.

    `base_channels` intermediate channels of the base are stored (all, unless it was pruned statically), and
    `dynamic_channels` more of its down matrix are skipped for every batch at run time. `base` says how the base of each
    role is stored, of those that have one. Of a role in `rotation`, stored matrices are multiplied with rotated inputs,
    by the rotation of that seed.
    """

    shape: MoEShape
    weights: Mapping[Role, tuple[Representation, ...] | None]
    base_channels: int
    dynamic_channels: int = 0
    base: Mapping[Role, Representation] = field(default_factory=lambda: DENSE_BASE)
    rotation: Mapping[Role, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.stored_experts not in (self.shape.experts, self.shape.experts + 1):
            raise ValueError(f"{self.stored_experts} representations for {self.shape.experts} experts")
        if self.is_extended and any(weights is None for weights in self.weights.values()):
            raise ValueError("a shared expert can only be stored beside bases of all roles")
        if not 0 < self.base_channels <= self.shape.intermediate:
            raise ValueError(f"{self.base_channels} base channels of {self.shape.intermediate}")
        for role, base in self.compact_bases():
            _check(base, role, self.base_shape(role))
        for group in self.shape.groups:
            native = {self.weights[role] is None for role in group}
            if len(native) > 1:
                raise ValueError("gate and up are stored the same way: both with a base or both without")
            if len({self.base[role].is_whole for role in group}) > 1:
                raise ValueError("the bases of gate and up are either both dense or both not")
            if len({self.has_base(role) for role in group}) > 1:
                raise ValueError("gate and up have either both a base or both none")
        for role in self.shape.roles:
            weights = self.weights[role]
            if weights is not None and len(weights) != self.stored_experts:
                raise ValueError(f"{role}: {len(weights)} representations for {self.shape.experts} experts")
            for weight in set(weights or ()):
                _check(weight, role, self.shape.matrix(role))
            common = [own for weight in weights or () if (own := weight.shared_tensors(self.shape.matrix(role)))]
            if any(own != common[0] for own in common):
                raise ValueError(f"{role}: the experts do not share the same factor")
        if not 0 <= self.dynamic_channels < self.base_channels:
            raise ValueError(f"{self.dynamic_channels} dynamic channels of {self.base_channels}")
        if (self.is_pruned or self.dynamic_channels) and self.is_baseless:
            raise ValueError("there is no base to prune")
        for role in self.rotation:
            _check_rotation(self, role)

    @classmethod
    def uniform(
        cls,
        shape: MoEShape,
        representation: Representation,
        base_channels: int | None = None,
        base: Mapping[Role, Representation] | None = None,
        *,
        extended: bool = False,
    ) -> "LayerLayout":
        """A layout in which every matrix of every expert is stored in the same way."""
        weights = dict.fromkeys(shape.roles, (representation,) * (shape.experts + extended))
        return cls(shape, weights, base_channels or shape.intermediate, base=base or DENSE_BASE)

    @property
    def stored_experts(self) -> int:
        """Number of experts with representations: the routed ones, and the shared expert if it is on the base, too."""
        return max(
            (len(weights) for weights in self.weights.values() if weights is not None), default=self.shape.experts
        )

    @property
    def is_extended(self) -> bool:
        """Whether the shared expert is stored as one more delta to the base (DeRS, Appendix A)."""
        return self.stored_experts > self.shape.experts

    def of(self, experts: Sequence[int]) -> "LayerLayout":
        """The layout of some routed experts alone, in that order, with all of the base; no shared expert is in it."""
        weights = {
            role: None if own is None else tuple(own[expert] for expert in experts)
            for role, own in self.weights.items()
        }
        return replace(self, shape=replace(self.shape, experts=len(experts)), weights=weights)

    @property
    def is_native(self) -> bool:
        """Whether all matrices of the layer's experts are stored whole, as transformers has them."""
        return all(self.weights[role] is None for role in self.shape.roles)

    @property
    def is_pruned(self) -> bool:
        """Whether the file holds fewer channels of the base than experts have neurons."""
        return self.base_channels < self.shape.intermediate

    @property
    def is_baseless(self) -> bool:
        """Whether experts are stored by moetool and nothing is their base."""
        return not self.is_native and not any(self.has_base(role) for role in self.shape.roles)

    def input_rotation(self, role: Role) -> Rotation | None:
        """The rotation that the inputs of a role's matrices go through; `None` if they are not rotated."""
        return Rotation(self.shape.matrix(role)[1], self.rotation[role]) if role in self.rotation else None

    def base_shape(self, role: Role) -> tuple[int, int]:
        """The shape `[out, in]` of a role's base as stored, that is, without its pruned channels."""
        if role == "down":
            return self.shape.hidden, self.base_channels
        return self.base_channels, self.shape.hidden

    def has_base(self, role: Role) -> bool:
        """Whether the deltas of a role are to something; if not, each is the expert's matrix."""
        return self.weights[role] is not None and bool(self.base[role].tensors(self.base_shape(role)))

    def has_dense_base(self, role: Role) -> bool:
        """Whether a role has a base and it is stored as the matrix it is, under its native name."""
        return self.weights[role] is not None and self.base[role].is_whole

    def native_shape(self, role: Role) -> tuple[int, int]:
        """Shape of what stands at the native name of expert 0, for a role with a base: that, or its placeholder."""
        return self.base_shape(role) if self.has_dense_base(role) else PLACEHOLDER

    def compact_bases(self) -> Iterator[tuple[Role, Representation]]:
        """Iterate over the roles whose base is not a dense matrix, with the base's form."""
        for role in self.shape.roles:
            if self.weights[role] is not None and not self.has_dense_base(role):
                yield role, self.base[role]

    def deltas(self) -> Iterator[tuple[int, Role, Representation]]:
        """Iterate over the matrices that are not native: expert, role and form."""
        for role in self.shape.roles:
            for expert, representation in enumerate(self.weights[role] or ()):
                yield expert, role, representation

    def shared_tensors(self, role: Role) -> dict[str, Stored]:
        """Tensors that all experts' representations of a role share, by name; empty if there are none."""
        for weight in self.weights[role] or ():
            if own := weight.shared_tensors(self.shape.matrix(role)):
                return own
        return {}

    def own_tensors(self) -> Iterator[tuple[str, Stored]]:
        """Every tensor under moetool's own names, relative to the experts, in the order in which it is written."""
        if self.is_pruned:
            yield BASE_CHANNELS, Stored((self.base_channels,), torch.int32)
        for role, representation in self.compact_bases():
            for tensor, stored in representation.tensors(self.base_shape(role)).items():
                yield base_name(role, tensor), stored
        yield from self.delta_tensors()

    def delta_tensors(self) -> Iterator[tuple[str, Stored]]:
        """The tensors of a layer that store deltas, without those of bases."""
        for role in self.shape.roles:
            for tensor, stored in self.shared_tensors(role).items():
                yield shared_name(role, tensor), stored
        for expert, role, representation in self.deltas():
            for tensor, stored in representation.tensors(self.shape.matrix(role)).items():
                yield delta_name(expert, role, tensor), stored

    def native_parameters(self) -> int:
        """Numbers under native names: bases, and experts that were left as they were. Placeholders are none."""
        total = 0
        for role in self.shape.roles:
            if self.weights[role] is None:
                total += math.prod(self.shape.matrix(role)) * self.shape.experts
            elif self.has_dense_base(role):
                total += math.prod(self.base_shape(role))
        return total

    def stored_parameters(self) -> int:
        """Numbers in the file for this layer's experts (channel indices and placeholders not counted)."""
        own = sum(math.prod(stored.shape) for name, stored in self.own_tensors() if name != BASE_CHANNELS)
        return self.native_parameters() + own

    def expert_parameters(self, expert: int) -> float:
        """Numbers that one expert has for itself, as the papers count them: deltas or matrices, and biases."""
        total = float(self.shape.bias_parameters)
        for role in self.shape.roles:
            rows, columns = matrix = self.shape.matrix(role)
            weights = self.weights[role]
            total += rows * columns if weights is None else weights[expert].counted_parameters(matrix)
        return total

    def added_parameters(self) -> float:
        """Parameters of this layer beyond one dense FFN, as the papers count them.

        These are all deltas, or without a base all experts but one, and all biases but one expert's.
        """
        shape = self.shape
        native = sum(math.prod(shape.matrix(role)) for role in shape.roles if self.weights[role] is None)
        own = sum(self.expert_parameters(expert) for expert in range(self.stored_experts))
        return own - native - shape.bias_parameters

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of this layer's experts on disk, in a model stored in `dtype`."""
        own = sum(stored.nbytes(dtype) for _, stored in self.own_tensors())
        placeholders = sum(math.prod(PLACEHOLDER) for _ in self.compact_bases())
        return (self.native_parameters() + placeholders) * dtype.itemsize + own

    def to_config(self) -> dict[str, object]:
        """Return the layout as JSON values for `quantization_config`, which `from_config` reads back."""
        config: dict[str, object] = {
            role: None if weights is None else [weight.spec for weight in weights]
            for role, weights in self.weights.items()
        }
        if self.is_pruned:
            config["base_channels"] = self.base_channels
        if self.dynamic_channels:
            config["dynamic_channels"] = self.dynamic_channels
        if compact := {role: representation.spec for role, representation in self.compact_bases()}:
            config["base"] = compact
        if self.rotation:
            config["rotation"] = dict(self.rotation)
        return config

    @classmethod
    def from_config(cls, shape: MoEShape, config: Mapping[str, object]) -> "LayerLayout":
        """Inverse of `to_config`.

        Raises:
            InvalidInputError: the entry is not one this version writes.
        """
        unknown = set(config) - {*shape.roles, "base_channels", "dynamic_channels", "base", "rotation"}
        if unknown:
            raise InvalidInputError(f"has entries this moetool does not know: {sorted(unknown)}.")
        channels = _whole(config, "base_channels", shape.intermediate)
        dynamic = _whole(config, "dynamic_channels", 0)
        weights: dict[Role, tuple[Representation, ...] | None] = {}
        for role in shape.roles:
            specs = config.get(role)
            if not isinstance(specs, (list, type(None))):
                raise InvalidInputError(f"{role} must be a list or null, not {specs!r}.")
            weights[role] = None if specs is None else tuple(parse_representation(spec) for spec in specs)
        compact = config.get("base", {})
        if not isinstance(compact, Mapping) or set(compact) - set(shape.roles):
            raise InvalidInputError(f"base must be an object by role, not {compact!r}.")
        base = {role: parse_representation(compact[role]) if role in compact else Dense() for role in shape.roles}
        rotation = config.get("rotation", {})
        if not isinstance(rotation, Mapping) or set(rotation) - set(shape.roles):
            raise InvalidInputError(f"rotation must be an object by role, not {rotation!r}.")
        seeds = {role: _whole(rotation, role, 0) for role in shape.roles if role in rotation}
        try:
            return cls(shape, weights, channels, dynamic, base, seeds)
        except (ValueError, TypeError) as error:
            raise InvalidInputError(f"does not fit the model: {error}.") from error


def _whole(config: Mapping[str, object], name: str, default: int) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError(f"{name} must be a whole number, not {value!r}.")
    return value


def _check(representation: Representation, role: Role, shape: tuple[int, int]) -> None:
    try:
        representation.tensors(shape)
    except ValueError as error:
        raise ValueError(f"{role} cannot be stored as '{representation.spec}': {error}") from error


def _check_rotation(layout: LayerLayout, role: Role) -> None:
    if layout.weights[role] is None or layout.has_dense_base(role) or layout.is_pruned or layout.dynamic_channels:
        raise ValueError("only routed experts on a quantized base, or on none, can be rotated")
    if layout.is_extended:
        raise ValueError("a shared expert cannot be rotated")
    if not 0 <= layout.rotation[role] < 2**63:
        raise ValueError(f"a rotation's seed lies from 0 to 2^63 - 1, not at {layout.rotation[role]}")
    if len({layout.rotation.get(other) for other in layout.shape.group(role)}) > 1:
        raise ValueError("gate and up are given the same inputs, rotated in the same way or not at all")
    if any(weight.is_whole for weight in layout.weights[role] or ()):
        raise ValueError("a matrix that is stored as it is cannot be rotated")


def native_layout(shape: MoEShape) -> LayerLayout:
    """Layout of a layer whose experts are as in an ordinary checkpoint of the family."""
    return LayerLayout(shape, dict.fromkeys(shape.roles), shape.intermediate)
