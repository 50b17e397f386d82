"""PESC (arXiv:2401.02731): adapters as experts on a layer's one feed-forward network `{ffn}`.

On disk: the network under `{ffn}.ffn.`, the router `{ffn}.gate.weight [experts, hidden]`, all adapters in
`{ffn}.adapters.down_proj [experts, width, hidden]` and `{ffn}.adapters.up_proj [experts, hidden, width]`.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from moetool.architectures.dense import DenseArchitecture
from moetool.format.fields import Count, Layers, Number
from moetool.format.kinds.base import RoutedModule, Shape, Shapes, numbers, with_networks_inside

ROUTER, DOWN, UP = "gate.weight", "adapters.down_proj", "adapters.up_proj"


class PescSpec(RoutedModule):
    """Adapters on feed-forward networks.

    Attributes:
        experts: adapters per layer.
        top_k: of them per token.
        layers: which decoder layers have them, ascending.
        width: of an adapter's hidden layer.
        scale: of an adapter's output.
        dropout: of an adapter's input while it is trained.
    """

    name: ClassVar[str] = "pesc"
    key: ClassVar[str] = "adapter_experts"
    what: ClassVar[str] = "a model whose experts are adapters (PESC), which are no feed-forward networks"
    made: ClassVar[str] = "has experts already: adapters, by PESC"
    title: ClassVar[str] = "adapters as experts (PESC)"

    layers: Layers
    width: Count
    scale: Number
    dropout: Annotated[float, Field(strict=True, ge=0, lt=1)]

    @property
    def rule(self) -> str:
        return "top-k, softmax over the k"

    def among(self, layers: int) -> tuple[int, ...]:
        return self.layers

    def tensors(self, hidden: int) -> dict[str, Shape]:
        """The tensors that a layer gains, by name relative to its block."""
        return {
            ROUTER: (self.experts, hidden),
            DOWN: (self.experts, self.width, hidden),
            UP: (self.experts, hidden, self.width),
        }

    def moved(self, dense: DenseArchitecture, shapes: Shapes) -> dict[str, str]:
        return with_networks_inside(dense, self.layers, shapes)

    def new(self, dense: DenseArchitecture, shapes: Shapes) -> set[str]:
        return {dense.ffn_prefix(layer) + name for layer in self.layers for name in (ROUTER, DOWN, UP)}

    def idle(self, dense: DenseArchitecture, shapes: Shapes) -> int:
        adapters = numbers(shapes, (dense.ffn_prefix(layer) + name for layer in self.layers for name in (DOWN, UP)))
        return adapters // self.experts * (self.experts - self.top_k)


KIND = PescSpec
