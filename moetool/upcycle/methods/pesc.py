"""Upcycling to experts that are adapters on the dense model's own feed-forward networks (PESC, arXiv:2401.02731)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from moetool.checkpoint.sizes import Part
from moetool.convert.parts import Converted, Customized, Made
from moetool.format.kinds.base import PLACEHOLDER, Shape
from moetool.format.kinds.pesc import DOWN, ROUTER, UP, PescSpec
from moetool.job.options import RunOptions
from moetool.job.result import Json
from moetool.numerics.seeding import generator, linear_std, uniform
from moetool.upcycle.routing import RoutedConversion, RoutedOptions, Rows


class PescOptions(RoutedOptions):
    """Options of PESC upcycling: width, output scale and dropout of the adapters."""

    width: int = Field(512, ge=1, description="Width of an adapter's hidden layer.")
    scale: float = Field(1.0, gt=0, description="Of an adapter's output.")
    dropout: Part = Field(0.1, ge=0, lt=1, description="Of an adapter's input while it is trained.")


class Pesc(RoutedConversion[PescOptions]):
    """Parameter-Efficient Sparsity Crafting: every FFN stays one, and adapters on its output differ by expert."""

    name: ClassVar[str] = "pesc"
    summary: ClassVar[str] = "the dense FFN once, and adapters on its output that training fills"
    options_type: ClassVar[type[RunOptions]] = PescOptions

    def routed_by(self, rows: Rows) -> Converted:
        options = self.options
        spec = PescSpec(
            experts=self.copies,
            top_k=options.top_k,
            layers=self.layers,
            width=options.width,
            scale=options.scale,
            dropout=options.dropout,
        )
        return WithAdapterExperts(dense=self.dense, dtype=self.new_dtype, seed=options.seed, spec=spec, router=rows)

    def details(self) -> dict[str, Json]:
        return {"experts": self.copies, "top_k": self.options.top_k, "moe_layers": len(self.layers)}

    def notes(self, config: dict[str, object]) -> list[str]:
        return ["only transformers runs adapters as experts, after `import moetool`"]


@dataclass(frozen=True, kw_only=True)
class WithAdapterExperts(Customized[PescSpec]):
    """A dense model with adapters beside its feed-forward networks, whose output is zero until they are trained.

    Attributes:
        router: rows `[experts, hidden]` for a layer.
    """

    router: Rows

    def unit(self, layer: int, names: list[str]) -> Iterator[Made]:
        yield from self.kept(names)
        if layer not in self.spec.layers:
            return
        prefix, shapes = self.dense.architecture.ffn_prefix(layer), self.spec.tensors(self.dense.hidden)
        yield self.joined(prefix + ROUTER, shapes[ROUTER], [partial(self.router, layer)])
        yield self.joined(prefix + DOWN, shapes[DOWN], [partial(self._down, layer, shapes[DOWN])])
        yield self.zeros(prefix + UP, shapes[UP])
        yield self.zeros(self.dense.architecture.weight_name(layer, "up"), PLACEHOLDER)

    def _down(self, layer: int, shape: Shape) -> Tensor:
        """The down projection of a layer's adapters, drawn as a fresh `nn.Linear` is (Kaiming, a = √5)."""
        return uniform(shape, linear_std(self.dense.hidden), generator(self.seed, "adapter", layer))
