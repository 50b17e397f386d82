"""(G-)MoEfication (Lee et al., 2024): the neurons of a feed-forward network `{ffn}` as experts, a run of them each.

On disk: the network under `{ffn}.ffn.`, its neurons in the order of the experts, their representative values
`{ffn}.centre [intermediate]`, and `{ffn}.selector.first.weight [experts, hidden]` and `{ffn}.selector.second.weight
[experts, experts]`, or `{ffn}.order [experts]` for a selection that is the same for all tokens.
"""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from moetool.architectures.dense import DenseArchitecture
from moetool.format.fields import Layers
from moetool.format.kinds.base import CustomModule, Shape, Shapes, numbers, with_networks_inside

SelectorKind = Literal["mlp", "oracle", "fixed"]

CENTRE, FIRST, SECOND, ORDER = "centre", "selector.first.weight", "selector.second.weight", "order"


def is_selector(name: str) -> bool:
    """Whether a tensor is of a network that selects experts, by its name on disk or in memory."""
    return name.endswith((FIRST, SECOND))


class MoefiedSpec(CustomModule):
    """Feed-forward networks in parts.

    Attributes:
        experts: per layer, of equally many neurons.
        keep: share of them per token.
        selector: what chooses: `mlp`, a small network; `oracle`, the true scores; `fixed`, the first of a fixed order.
        layers: which decoder layers are split, ascending.
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
        chooser = {"mlp": "a small network", "oracle": "an oracle", "fixed": "a fixed order"}[self.selector]
        return f"the highest scores by {chooser}"

    def keeping(self, keep: float) -> "MoefiedSpec":
        """This kind with another share of the experts per token. Raises `InvalidInputError` for an impossible one."""
        return self.from_config({**self.to_config(), "keep": keep})

    def among(self, layers: int) -> tuple[int, ...]:
        return self.layers

    def tensors(self, hidden: int, intermediate: int) -> dict[str, Shape]:
        """The tensors that a layer gains, by name relative to its block."""
        selectors: dict[SelectorKind, dict[str, Shape]] = {
            "mlp": {FIRST: (self.experts, hidden), SECOND: (self.experts, self.experts)},
            "fixed": {ORDER: (self.experts,)},
            "oracle": {},
        }
        return {CENTRE: (intermediate,), **selectors[self.selector]}

    def selector_size(self, hidden: int) -> int:
        """Number of parameters of one layer's selector, for hidden states of so many channels."""
        return sum(math.prod(shape) for shape in self.tensors(hidden, 0).values())

    def moved(self, dense: DenseArchitecture, shapes: Shapes) -> dict[str, str]:
        return with_networks_inside(dense, self.layers, shapes)

    def new(self, dense: DenseArchitecture, shapes: Shapes) -> set[str]:
        return {dense.ffn_prefix(layer) + name for layer in self.layers for name in self.tensors(1, 1)}

    def idle(self, dense: DenseArchitecture, shapes: Shapes) -> int:
        paths = dense.linear_paths
        ends = {f"{path}.{kind}" for path in paths.values() for kind in ("weight", "bias")} - {f"{paths['down']}.bias"}
        names = (f"{dense.ffn_prefix(layer)}ffn.{end}" for layer in self.layers for end in sorted(ends))
        neurons = numbers(shapes, (name for name in names if name in shapes))
        return neurons // self.experts * (self.experts - self.at_work)


KIND = MoefiedSpec
