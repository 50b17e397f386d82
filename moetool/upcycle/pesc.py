"""The tensors of a model whose experts are adapters on its own feed-forward networks (PESC, arXiv:2401.02731)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from moetool.architectures.custom_moe import ROUTER
from moetool.checkpoint.files import patch_config
from moetool.convert.parts import REST, Converted, Made
from moetool.format.entry import own_entry
from moetool.numerics.seeding import generator, linear_std, uniform


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
    router: Callable[[int], Tensor]

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
