"""How the experts of one MoE layer are stored: a shared base, and one representation per expert and matrix.

Gate and up form one group, down the other; each group is either left as it was (`None`) or has a base of its own.
Everything else follows from that: names, shapes, bytes, and the run-time module.

Names are chosen so that nothing can be loaded by mistake. The base takes the native name of expert 0 and is the only
one of its kind, so a reader that does not know moetool finds one expert where the config promises many and stops.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moetool.architectures import ROLES, MoEShape, Role
from moetool.errors import InvalidInputError
from moetool.representations import Representation, parse_representation

GROUPS: tuple[tuple[Role, ...], ...] = (("gate", "up"), ("down",))
BASE_CHANNELS = "base_channels"  # indices of the intermediate channels that the stored base still has


def delta_name(expert: int, role: Role, tensor: str) -> str:
    """Name of one representation's tensor, relative to the experts, on disk and in memory alike."""
    return f"moetool.{expert}.{role}.{tensor}"


@dataclass(frozen=True)
class LayerLayout:
    """Storage of one layer's experts.

    `base_channels` intermediate channels of the base are stored (all, unless it was pruned statically), and
    `dynamic_channels` more of its down matrix are skipped for every batch at run time.
    """

    shape: MoEShape
    weights: Mapping[Role, tuple[Representation, ...] | None]
    base_channels: int
    dynamic_channels: int = 0

    def __post_init__(self) -> None:
        for group in GROUPS:
            native = {self.weights[role] is None for role in group}
            if len(native) > 1:
                raise ValueError("gate and up are stored the same way: both with a base or both without")
        for role in ROLES:
            weights = self.weights[role]
            if weights is not None and len(weights) != self.shape.experts:
                raise ValueError(f"{role}: {len(weights)} representations for {self.shape.experts} experts")
        if not 0 < self.base_channels <= self.shape.intermediate:
            raise ValueError(f"{self.base_channels} base channels of {self.shape.intermediate}")
        if not 0 <= self.dynamic_channels < self.base_channels:
            raise ValueError(f"{self.dynamic_channels} dynamic channels of {self.base_channels}")

    @classmethod
    def uniform(
        cls, shape: MoEShape, representation: Representation, base_channels: int | None = None
    ) -> "LayerLayout":
        """Every matrix of every expert stored in the same way."""
        weights = dict.fromkeys(ROLES, (representation,) * shape.experts)
        return cls(shape, weights, base_channels or shape.intermediate)

    @property
    def is_native(self) -> bool:
        """Whether nothing about this layer is moetool's."""
        return all(self.weights[role] is None for role in ROLES)

    @property
    def is_pruned(self) -> bool:
        """Whether channels of the base are missing from the file."""
        return self.base_channels < self.shape.intermediate

    def base_shape(self, role: Role) -> tuple[int, int]:
        """Shape of the stored base, without its pruned channels."""
        if role == "down":
            return self.shape.hidden, self.base_channels
        return self.base_channels, self.shape.hidden

    def deltas(self) -> Iterator[tuple[int, Role, Representation]]:
        """Every matrix that is not native."""
        for role in ROLES:
            for expert, representation in enumerate(self.weights[role] or ()):
                yield expert, role, representation

    def delta_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of the representations, in the order in which they are written."""
        for expert, role, representation in self.deltas():
            for tensor, shape in representation.shapes(self.shape.matrix(role)).items():
                yield delta_name(expert, role, tensor), shape

    def stored_parameters(self) -> int:
        """Numbers in the file for this layer's experts (channel indices not counted)."""
        total = 0
        for role in ROLES:
            weights, matrix = self.weights[role], self.shape.matrix(role)
            if weights is None:
                total += self.shape.experts * matrix[0] * matrix[1]
            else:
                rows, columns = self.base_shape(role)
                total += rows * columns + sum(weight.parameters(matrix) for weight in weights)
        return total

    def to_config(self) -> dict[str, Any]:
        """JSON form, for `quantization_config` in `config.json`."""
        config: dict[str, Any] = {
            role: None if weights is None else [weight.spec for weight in weights]
            for role, weights in self.weights.items()
        }
        if self.is_pruned:
            config["base_channels"] = self.base_channels
        if self.dynamic_channels:
            config["dynamic_channels"] = self.dynamic_channels
        return config

    @classmethod
    def from_config(cls, shape: MoEShape, config: Mapping[str, Any]) -> "LayerLayout":
        """Inverse of `to_config`.

        Raises:
            InvalidInputError: the entry is not one this version writes.
        """
        unknown = set(config) - {*ROLES, "base_channels", "dynamic_channels"}
        if unknown:
            raise InvalidInputError(f"quantization_config has entries this moetool does not know: {sorted(unknown)}.")
        weights: dict[Role, tuple[Representation, ...] | None] = {}
        for name in ("base_channels", "dynamic_channels"):
            if not isinstance(config.get(name, 0), int):
                raise InvalidInputError(
                    f"quantization_config does not fit the model: {name} must be a whole number, not {config[name]!r}."
                )
        for role in ROLES:
            specs = config.get(role)
            if not isinstance(specs, (list, type(None))):
                raise InvalidInputError(f"quantization_config: {role} must be a list or null, not {specs!r}.")
            weights[role] = None if specs is None else tuple(parse_representation(spec) for spec in specs)
        try:
            return cls(
                shape,
                weights,
                config.get("base_channels", shape.intermediate),
                config.get("dynamic_channels", 0),
            )
        except (ValueError, TypeError) as error:
            raise InvalidInputError(f"quantization_config does not fit the model: {error}.") from error


def native_layout(shape: MoEShape) -> LayerLayout:
    """A layer as its own checkpoint stores it."""
    return LayerLayout(shape, dict.fromkeys(ROLES), shape.intermediate)
