"""The tensors of a model with sparse interpolated experts (SIMoE), which start as the dense model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moetool.checkpoint.files import patch_config
from moetool.checkpoint.writer import TensorSpec
from moetool.convert.parts import REST, Converted, Made
from moetool.format.entry import own_entry
from moetool.numerics.hard_concrete import log_phi_for
from moetool.numerics.seeding import generator, linear_std, uniform

# Of a mask element, before it is trained: the probability of zero, and the noise that tells experts apart.
CLOSED, NOISE = 0.05, 0.05


@dataclass(frozen=True, kw_only=True)
class Interpolated(Converted):
    """A dense model with a shared difference of zero and masks on every linear layer of its decoder layers.

    Attributes:
        experts: masks per linear layer.
        router_width: of the router's hidden layer.
        sparsity: the share of mask elements that training is to close.
    """

    experts: int
    router_width: int
    sparsity: float

    def config(self) -> dict[str, Any]:
        described = {
            "experts": self.experts,
            "router_width": self.router_width,
            "sparsity": self.sparsity,
            "channels": None,
        }
        entry = own_entry("interpolated", described)
        return patch_config(self.dense.checkpoint.config, quantization_config=entry, **self.dtype_entry())

    def units(self) -> list[tuple[int, list[Made]]]:
        return [(layer, list(self._unit(layer, names))) for layer, names in self.names().items()]

    def _unit(self, layer: int, names: list[str]) -> Iterator[Made]:
        if layer == REST:
            yield from map(self.copied, names)
            yield from self._router()
            return
        linear = {name.removesuffix(".weight") for name in names if self._is_linear(name)}
        for name in names:
            site, _, kind = name.rpartition(".")
            yield self.copied(name, f"{site}.linear.{kind}") if site in linear else self.copied(name)
        for site in sorted(linear):
            rows, columns = self.dense.checkpoint.info(f"{site}.weight").shape
            yield self.filled(f"{site}.weight", (1, 1))
            yield self.filled(f"{site}.delta", (rows, columns))
            masks = TensorSpec(f"{site}.log_phi", torch.float32, (self.experts, columns))
            yield Made(masks, partial(self._masks, site, columns))

    def _is_linear(self, name: str) -> bool:
        return name.endswith(".weight") and len(self.dense.checkpoint.info(name).shape) == 2

    def _masks(self, site: str, columns: int) -> Tensor:
        noise = torch.randn(self.experts, columns, generator=generator(self.seed, "masks", site))
        return log_phi_for(CLOSED) + NOISE * noise

    def _router(self) -> Iterator[Made]:
        """Two fresh linear layers, the second without a preference."""
        decoder = self.dense.architecture.layer.partition(".{layer}")[0].rpartition(".")[0]
        hidden, width, prefix = self.dense.hidden, self.router_width, f"{decoder}.interpolation."
        shapes = {"first": (width, hidden), "second": (self.experts, width)}
        for name, shape in shapes.items():
            draw = partial(uniform, shape, linear_std(shape[1]), generator(self.seed, "router", name))
            yield self.joined(f"{prefix}{name}.weight", shape, [draw])
            yield self.filled(f"{prefix}{name}.bias", shape[:1])
        yield Made(TensorSpec(f"{prefix}multiplier", torch.float32, (1,)), partial(torch.zeros, 1))

    @property
    def linear_parameters(self) -> int:
        """Numbers in all linear layers that have masks."""
        return sum(
            math.prod(self.dense.checkpoint.info(name).shape)
            for layer, names in self.names().items()
            for name in names
            if layer != REST and self._is_linear(name)
        )

    def parameters(self) -> dict[str, int]:
        specs = [made.spec for _, unit in self.units() for made in unit]
        masks = sum(spec.shape[1] for spec in specs if spec.name.endswith(".log_phi"))
        router = self.router_width * (self.dense.hidden + 1 + self.experts) + self.experts
        added = self.linear_parameters + self.experts * masks + router
        total = self.dense.parameters + added
        return {"total": total, "active": total, "added": added}
