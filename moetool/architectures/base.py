"""What moetool knows about a model family: names on disk, names in memory, and where the config keeps its numbers.

An `Architecture` is data. It holds no code that depends on the family, so that a new family is one new file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from moetool.errors import InvalidInputError

Role = Literal["gate", "up", "down"]
ROLES: tuple[Role, ...] = ("gate", "up", "down")


@dataclass(frozen=True)
class MoEShape:
    """The numbers of one MoE layer: `experts` of `hidden` → `intermediate` → `hidden`, `top_k` of them per token."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def matrix(self, role: Role) -> tuple[int, int]:
        """Shape `[out, in]` of one expert's matrix of that role, as torch stores it."""
        if role == "down":
            return self.hidden, self.intermediate
        return self.intermediate, self.hidden


@dataclass(frozen=True)
class Architecture:
    """One model family, by name templates.

    `{layer}` and `{expert}` are filled in with numbers. Names on disk are those of the hub's checkpoints; names in
    memory are what transformers 5 holds after loading, where `experts_module` owns the fused tensors
    `gate_up_proj [experts, 2·intermediate, hidden]` and `down_proj [experts, hidden, intermediate]`.
    """

    name: str
    model_types: tuple[str, ...]
    reference: str
    layer: str  # prefix of one decoder layer, on disk and in memory
    experts: str  # prefix on disk of everything that belongs to the routed experts, relative to the layer
    weights: Mapping[Role, str]  # one expert's matrix on disk, relative to `experts`
    router: str  # router weight on disk, relative to the layer
    experts_module: str  # module path in memory, relative to the layer
    experts_key: str  # config key: number of routed experts
    top_k_key: str
    intermediate_key: str
    router_rule: str  # in words; the router itself is never touched
    extra_block_names: tuple[str, ...] = field(default=())  # other tensors allowed inside the MoE block, on disk

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", MappingProxyType(dict(self.weights)))

    def layers(self, config: Mapping[str, Any]) -> int:
        """Number of decoder layers."""
        return self.number(config, "num_hidden_layers")

    def moe_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Which decoder layers are mixtures of experts, by `config.json`."""
        return tuple(range(self.layers(config)))

    def shape(self, config: Mapping[str, Any]) -> MoEShape:
        """The shape that `config.json` promises for every MoE layer.

        Raises:
            InvalidInputError: a number is missing, or more experts are routed than exist.
        """
        shape = MoEShape(
            experts=self.number(config, self.experts_key),
            top_k=self.number(config, self.top_k_key),
            hidden=self.number(config, "hidden_size"),
            intermediate=self.number(config, self.intermediate_key),
        )
        if shape.top_k > shape.experts:
            raise InvalidInputError(
                f"config.json routes every token to {shape.top_k} experts ({self.top_k_key}) "
                f"but has only {shape.experts} ({self.experts_key})."
            )
        return shape

    def number(self, config: Mapping[str, Any], key: str) -> int:
        """A positive integer of `config.json`."""
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInputError(
                f"config.json of a {self.name} model needs a positive whole number '{key}', found {value!r}."
            )
        return value

    def layer_prefix(self, layer: int) -> str:
        """`model.layers.3.`"""
        return self.layer.format(layer=layer) + "."

    def experts_prefix(self, layer: int) -> str:
        """`model.layers.3.block_sparse_moe.experts.`, on disk."""
        return f"{self.layer_prefix(layer)}{self.experts}."

    def weight_name(self, layer: int, expert: int, role: Role) -> str:
        """Name on disk of one expert's matrix."""
        return self.experts_prefix(layer) + self.weights[role].format(expert=expert)

    def router_name(self, layer: int) -> str:
        """Name on disk of the layer's router weight."""
        return self.layer_prefix(layer) + self.router

    def block_prefix(self, layer: int) -> str:
        """Prefix on disk of the whole MoE block (router and experts): every tensor under it must be known."""
        return self.layer_prefix(layer) + self.experts.rsplit(".", 1)[0] + "."
