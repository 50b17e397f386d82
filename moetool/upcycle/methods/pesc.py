"""PESC: a dense model whose experts are adapters."""

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from moetool.convert.parts import Converted
from moetool.job.options import RunOptions
from moetool.upcycle.pesc import WithAdapterExperts
from moetool.upcycle.routed import RoutedConversion, RoutedOptions


class PescOptions(RoutedOptions):
    """How large the adapters are."""

    width: int = Field(512, ge=1, description="Width of an adapter's hidden layer.")
    scale: float = Field(1.0, gt=0, description="Of an adapter's output.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Of an adapter's input while it is trained.")


class Pesc(RoutedConversion[PescOptions]):
    """Parameter-Efficient Sparsity Crafting: every FFN stays one, and adapters on its output differ by expert."""

    name: ClassVar[str] = "pesc"
    summary: ClassVar[str] = "the dense FFN once, and adapters on its output that training fills"
    options_type: ClassVar[type[RunOptions]] = PescOptions
    method_of: ClassVar[str | None] = "upcycle"

    def with_router(self, router: Callable[[int], Tensor]) -> Converted:
        options = self.options
        return WithAdapterExperts(
            dense=self.dense,
            dtype=self.new_dtype,
            seed=options.seed,
            experts=self.copies,
            top_k=options.top_k,
            layers=self.layers,
            width=options.width,
            scale=options.scale,
            dropout=options.dropout,
            router=router,
        )

    def details(self) -> dict[str, Any]:
        return {"experts": self.copies, "top_k": self.options.top_k, "moe_layers": len(self.layers)}

    def notes(self, config: dict[str, Any]) -> list[str]:
        return ["only transformers, after `import moetool`, runs adapters as experts"]
