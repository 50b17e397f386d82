"""PESC: a dense model whose experts are adapters on its own feed-forward networks (arXiv:2401.02731)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from moetool.architectures.custom_moe import ROUTER
from moetool.checkpoint.files import patch_config
from moetool.convert.layers import parse_layers
from moetool.convert.parts import REST, Converted, Made
from moetool.convert.stage import Conversion, Measured
from moetool.format.entry import own_entry
from moetool.job.job import DenseSource, Job
from moetool.job.options import RunOptions
from moetool.job.result import Json
from moetool.numerics.seeding import generator, linear_std, uniform
from moetool.upcycle.routing import RoutedOptions, Rows, check_routing, fresh_rows, starting_rows


class PescOptions(RoutedOptions):
    """How large the adapters are."""

    width: int = Field(512, ge=1, description="Width of an adapter's hidden layer.")
    scale: float = Field(1.0, gt=0, description="Of an adapter's output.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Of an adapter's input while it is trained.")


class Pesc(Conversion[PescOptions]):
    """Parameter-Efficient Sparsity Crafting: every FFN stays one, and adapters on its output differ by expert."""

    name: ClassVar[str] = "pesc"
    summary: ClassVar[str] = "the dense FFN once, and adapters on its output that training fills"
    options_type: ClassVar[type[RunOptions]] = PescOptions
    method_of: ClassVar[str | None] = "upcycle"

    @property
    def measures(self) -> bool:
        return self.options.center_router

    @cached_property
    def _layers(self) -> tuple[int, ...]:
        return parse_layers(self.options.layers, self.dense.layers)

    @property
    def _experts(self) -> int:
        assert self.options.experts is not None
        return self.options.experts

    def planned(self) -> Converted:
        check_routing(self.options, self._experts)
        return self._with_adapters(fresh_rows(self.options, self.dense, self._experts))

    def converted(self, job: Job[DenseSource]) -> Measured:
        fresh = fresh_rows(self.options, self.dense, self._experts)
        found = starting_rows(job, self.options, self._layers, fresh)
        return Measured(self._with_adapters(found.rows), found.calibration)

    def _with_adapters(self, rows: Rows) -> Converted:
        options = self.options
        return WithAdapterExperts(
            dense=self.dense,
            dtype=self.new_dtype,
            seed=options.seed,
            experts=self._experts,
            top_k=options.top_k,
            layers=self._layers,
            width=options.width,
            scale=options.scale,
            dropout=options.dropout,
            router=rows,
        )

    def details(self) -> dict[str, Json]:
        return {"experts": self._experts, "top_k": self.options.top_k, "moe_layers": len(self._layers)}

    def notes(self, config: dict[str, Any]) -> list[str]:
        return ["only transformers, after `import moetool`, runs adapters as experts"]


@dataclass(frozen=True, kw_only=True)
class WithAdapterExperts(Converted):
    """A dense model with adapters beside its feed-forward networks, whose output is zero until they are trained.

    Attributes:
        experts, top_k: adapters per layer, and of them per token.
        layers: which decoder layers have them, ascending.
        width: of an adapter's hidden layer.
        scale: of an adapter's output.
        dropout: of an adapter's input while it is trained.
        router: rows `[experts, hidden]` for a layer.
    """

    experts: int
    top_k: int
    layers: tuple[int, ...]
    width: int
    scale: float
    dropout: float
    router: Rows

    def config(self) -> dict[str, Any]:
        described = {
            "experts": self.experts,
            "top_k": self.top_k,
            "layers": list(self.layers),
            "width": self.width,
            "scale": self.scale,
            "dropout": self.dropout,
        }
        entry = own_entry("adapter_experts", described)
        return patch_config(self.dense.checkpoint.config, quantization_config=entry, **self.dtype_entry())

    def units(self) -> list[tuple[int, list[Made]]]:
        return [(layer, list(self._unit(layer, names))) for layer, names in self.names().items()]

    def _unit(self, layer: int, names: list[str]) -> Iterator[Made]:
        if layer == REST or layer not in self.layers:
            yield from map(self.copied, names)
            return
        dense = self.dense.architecture
        prefix, hidden = dense.ffn_prefix(layer), self.dense.hidden
        for name in names:
            inside = name.removeprefix(prefix)
            yield self.copied(name) if inside == name else self.copied(name, f"{prefix}ffn.{inside}")
        yield self.joined(prefix + ROUTER, (self.experts, hidden), [partial(self.router, layer)])
        shape = (self.experts, self.width, hidden)
        yield self.joined(f"{prefix}adapters.down_proj", shape, [partial(self._down, layer)])
        yield self.filled(f"{prefix}adapters.up_proj", (self.experts, hidden, self.width))
        yield self.filled(dense.weight_name(layer, "up"), (1, 1))

    def _down(self, layer: int) -> Tensor:
        """As a fresh `nn.Linear` (Kaiming, a = √5)."""
        shape = (self.experts, self.width, self.dense.hidden)
        return uniform(shape, linear_std(self.dense.hidden), generator(self.seed, "adapter", layer))

    def parameters(self) -> dict[str, int]:
        adapter = 2 * self.dense.hidden * self.width
        added = len(self.layers) * self.experts * (adapter + self.dense.hidden)
        total = self.dense.parameters + added
        idle = len(self.layers) * (self.experts - self.top_k) * adapter
        return {"total": total, "active": total - idle, "added": added}
