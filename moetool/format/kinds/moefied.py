"""(G-)MoEfication (Lee et al., 2024): the neurons of a feed-forward network `{ffn}` as experts, a run of them each.

On disk: the network under `{ffn}.ffn.`, its neurons in the order of the experts, their representative values
`{ffn}.centre [intermediate]`, and what selects: `{ffn}.price [intermediate]` for one of the network's own projections,
`{ffn}.selector.first.weight [experts, hidden]` and `{ffn}.selector.second.weight [experts, experts]` for a network, or
`{ffn}.order [experts]` for a selection that is the same for all tokens.
"""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from moetool.architectures.dense import DenseArchitecture
from moetool.format.fields import Layers
from moetool.format.kinds.base import CustomModule, Shape, Shapes, numbers, with_networks_inside

SelectorKind = Literal["projection", "mlp", "oracle", "fixed"]
Lead = Literal["gate", "up"]

CENTRE, PRICE, FIRST, SECOND, ORDER = "centre", "price", "selector.first.weight", "selector.second.weight", "order"


def is_selector(name: str) -> bool:
    """Whether a tensor of floating point is of what selects experts, by its name on disk or in memory."""
    return name.endswith((f".{PRICE}", FIRST, SECOND))


class MoefiedSpec(CustomModule):
    """Feed-forward networks in parts.

    Attributes:
        experts: per layer, of equally many neurons.
        keep: share of them per token.
        selector: what chooses: `projection`, one of the network's own projections, by which every neuron is an expert;
            `mlp`, a small network; `oracle`, the true scores; `fixed`, the first of a fixed order.
        layers: which decoder layers are split, ascending.
        leads: of each of them the projection that chooses, which is computed for all neurons; none otherwise.
    """

    name: ClassVar[str] = "moefied"
    key: ClassVar[str] = "neuron_experts"
    what: ClassVar[str] = "a moefied model, whose experts are the neurons of its own feed-forward networks"
    made: ClassVar[str] = "is moefied already; `eval --keep` and moetool.set_keep change how many experts are used"
    title: ClassVar[str] = "neurons as experts (moefied)"
    commands: ClassVar[str] = f"repair, {CustomModule.commands}"

    keep: Annotated[float, Field(strict=True, gt=0, le=1)]
    selector: SelectorKind
    layers: Layers
    leads: tuple[Lead, ...] = ()

    @model_validator(mode="after")
    def _led(self) -> Self:
        wanted = len(self.layers) if self.selector == "projection" else 0
        if len(self.leads) != wanted:
            raise ValueError(f"leads are {len(self.leads)}, and there should be {wanted}")
        return self

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.at_work:
            raise ValueError(f"keep is {self.keep}, which leaves none of {self.experts} experts")
        return self

    @property
    def at_work(self) -> int:
        return round(self.keep * self.experts)

    @property
    def rule(self) -> str:
        choosers: dict[SelectorKind, str] = {
            "projection": "the neuron's gate or up projection",
            "mlp": "a small network",
            "oracle": "an oracle",
            "fixed": "a fixed order",
        }
        return f"the highest scores by {choosers[self.selector]}"

    def keeping(self, keep: float) -> "MoefiedSpec":
        """This kind with another share of the experts per token. Raises `InvalidInputError` for an impossible one."""
        return self.from_config({**self.to_config(), "keep": keep})

    def to_config(self) -> dict[str, object]:
        return {name: value for name, value in super().to_config().items() if name != "leads" or value}

    def among(self, layers: int) -> tuple[int, ...]:
        return self.layers

    def lead(self, layer: int) -> Lead | None:
        """The projection that chooses the neurons of a layer."""
        return dict(zip(self.layers, self.leads, strict=False)).get(layer)

    def tensors(self, hidden: int, intermediate: int) -> dict[str, Shape]:
        """The tensors that a layer gains, by name relative to its block."""
        selectors: dict[SelectorKind, dict[str, Shape]] = {
            "projection": {PRICE: (intermediate,)},
            "mlp": {FIRST: (self.experts, hidden), SECOND: (self.experts, self.experts)},
            "fixed": {ORDER: (self.experts,)},
            "oracle": {},
        }
        return {CENTRE: (intermediate,), **selectors[self.selector]}

    def selector_size(self, hidden: int, intermediate: int) -> int:
        """Number of parameters of one layer's selector, for hidden states of so many channels and so many neurons."""
        return sum(math.prod(shape) for name, shape in self.tensors(hidden, intermediate).items() if name != CENTRE)

    def moved(self, dense: DenseArchitecture, shapes: Shapes) -> dict[str, str]:
        return with_networks_inside(dense, self.layers, shapes)

    def new(self, dense: DenseArchitecture, shapes: Shapes) -> set[str]:
        return {dense.ffn_prefix(layer) + name for layer in self.layers for name in self.tensors(1, 1)}

    def idle(self, dense: DenseArchitecture, shapes: Shapes) -> int:
        return sum(self._idle(dense, layer, shapes) for layer in self.layers)

    def _idle(self, dense: DenseArchitecture, layer: int, shapes: Shapes) -> int:
        """Those of one layer: what neurons have that are left out, but for the projection that chooses."""
        lead, roles = self.lead(layer), dense.linear_paths.items()
        prefix, kinds = f"{dense.ffn_prefix(layer)}ffn.", ("weight", "bias")
        found = 0
        for role, path in roles:
            if dense.is_joined and role == "gate":
                continue  # with `up`, in one tensor
            names = [f"{prefix}{path}.{kind}" for kind in kinds if (role, kind) != ("down", "bias")]
            own = numbers(shapes, (name for name in names if name in shapes))
            if dense.is_joined and role == "up":
                found += own if lead is None else own // 2
            elif role != lead:
                found += own
        return found // self.experts * (self.experts - self.at_work)


KIND = MoefiedSpec
