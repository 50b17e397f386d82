"""SIMoE (Chen et al., 2025): masks as experts on one shared delta of every linear layer `{site}`.

On disk, in its place: `{site}.linear.weight`, `{site}.delta [out, channels]`, and while masks are trained
`{site}.log_phi [experts, in]`, afterwards `{site}.columns [channels]` and `{site}.fixed_gates [experts, channels]`. The
router lies under `{decoder}.interpolation.`: two linear layers, and while masks are trained the multiplier of their
constraint.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

from moetool.architectures.dense import DenseArchitecture
from moetool.format.fields import Count, Share, Whole
from moetool.format.kinds.base import Counts, CustomModule, Mask, Shape, Shapes

LINEAR, DELTA, MASKS, COLUMNS, GATES = "linear", "delta", "log_phi", "columns", "fixed_gates"
ROUTER, MULTIPLIER = "interpolation", "multiplier"


class SimoeSpec(CustomModule):
    """Masks on linear layers.

    Attributes:
        experts: masks per linear layer.
        router_width: of the router's hidden layer.
        sparsity: share of the masks' elements that training is to close.
        channels: how many input channels of every linear layer are left, by its name; `None` while masks are trained.
    """

    name: ClassVar[str] = "simoe"
    key: ClassVar[str] = "interpolated"
    what: ClassVar[str] = "a model whose experts are masks on its own weights (SIMoE)"
    made: ClassVar[str] = "has experts already: masks, by SIMoE"
    title: ClassVar[str] = "interpolated experts (SIMoE)"
    closed: ClassVar[tuple[str, ...]] = (f".{MASKS}", f".{MULTIPLIER}")
    whole: ClassVar[str | None] = "SIMoE's masks"  # under one constraint

    router_width: Count
    sparsity: Share
    channels: Mapping[str, Whole] | None

    @property
    def at_work(self) -> int:
        return self.experts

    @property
    def rule(self) -> str:
        return "softmax over all masks, one mix per prompt"

    def settled(self, channels: Mapping[str, int]) -> Self:
        return self.model_copy(update={"channels": dict(channels)})

    def tensors(self, rows: int, columns: int) -> dict[str, Shape]:
        """The tensors that a linear layer `[rows, columns]` gains while masks are trained, by name relative to it."""
        return {DELTA: (rows, columns), MASKS: (self.experts, columns)}

    def router_tensors(self, hidden: int) -> dict[str, Shape]:
        """The tensors of the router while masks are trained, by name relative to it."""
        return {
            "first.weight": (self.router_width, hidden),
            "first.bias": (self.router_width,),
            "second.weight": (self.experts, self.router_width),
            "second.bias": (self.experts,),
            MULTIPLIER: (1,),
        }

    def router_prefix(self, dense: DenseArchitecture) -> str:
        """The beginning of the router's tensor names, such as `model.interpolation.`."""
        return f"{dense.layer.partition('.{layer}')[0].rpartition('.')[0]}.{ROUTER}."

    def sites(self, dense: DenseArchitecture, shapes: Shapes) -> list[str]:
        """The linear layers of a dense model's decoder layers, whose masks these are: whatever has a matrix, but for
        norms that have weights `[heads, width]`."""
        layers = dense.layer.partition("{layer}")[0]
        matrices = [name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2]
        modules = [name.removesuffix(".weight") for name in matrices if name.startswith(layers)]
        return [module for module in modules if not module.endswith("norm")]

    def moved(self, dense: DenseArchitecture, shapes: Shapes) -> dict[str, str]:
        sites, found = set(self.sites(dense, shapes)), {}
        for name in shapes:
            site, _, kind = name.rpartition(".")
            found[name] = f"{site}.{LINEAR}.{kind}" if site in sites else name
        return found

    def new(self, dense: DenseArchitecture, shapes: Shapes) -> set[str]:
        ends = tuple(f".{part}" for part in (DELTA, MASKS, COLUMNS, GATES))
        return {name for name in shapes if name.endswith(ends) or name.startswith(self.router_prefix(dense))}

    def masks(self, shapes: Shapes) -> Mapping[str, Mask]:
        parts = [name.rpartition(".") for name in shapes]
        return {
            site: Mask(f"{site}.{kind}", shapes[f"{site}.{LINEAR}.weight"][1], kind == MASKS)
            for site, _, kind in parts
            if kind in (MASKS, GATES)
        }

    def counts(self, dense: DenseArchitecture, shapes: Shapes) -> Counts:
        """Numbers in a converted model, without the multiplier of the masks' constraint, which is no part of it."""
        multiplier = self.router_prefix(dense) + MULTIPLIER
        return super().counts(dense, {name: shape for name, shape in shapes.items() if name != multiplier})

    def idle(self, dense: DenseArchitecture, shapes: Shapes) -> int:
        return 0


KIND = SimoeSpec
