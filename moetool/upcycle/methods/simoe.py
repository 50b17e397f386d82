"""SIMoE: a dense model that finds its experts, and where to put them, while it is tuned."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from moetool.checkpoint.files import patch_config
from moetool.checkpoint.writer import TensorSpec
from moetool.convert.parts import REST, Converted, Made
from moetool.convert.stage import Conversion, ConversionOptions, Measured
from moetool.format.entry import own_entry
from moetool.job.job import DenseSource, Job
from moetool.job.options import RunOptions
from moetool.job.result import Json
from moetool.numerics.hard_concrete import log_phi_for
from moetool.numerics.seeding import generator, linear_std, uniform

# Of a mask element, before it is trained: the probability of zero, and the noise that tells experts apart.
CLOSED, NOISE = 0.05, 0.05


class SimoeOptions(ConversionOptions):
    """How many experts."""

    experts: int = Field(8, ge=2, description="Masks per linear layer.")
    router_width: int = Field(64, ge=1, description="Width of the router's hidden layer.")
    sparsity: float = Field(0.75, ge=0, lt=1, description="Share of the masks' elements that tuning is to close.")


class Simoe(Conversion[SimoeOptions]):
    """Sparse Interpolated Mixture-of-Experts: a shared difference on every linear layer, and masks as experts."""

    name: ClassVar[str] = "simoe"
    summary: ClassVar[str] = "masks on one shared delta per linear layer; training finds which and where"
    options_type: ClassVar[type[RunOptions]] = SimoeOptions
    method_of: ClassVar[str | None] = "upcycle"

    def planned(self) -> "Interpolated":
        options = self.options
        return Interpolated(
            dense=self.dense,
            dtype=self.new_dtype,
            seed=options.seed,
            experts=options.experts,
            router_width=options.router_width,
            sparsity=options.sparsity,
        )

    def converted(self, job: Job[DenseSource]) -> Measured:
        return Measured(self.planned())

    def details(self) -> dict[str, Json]:
        dense, left = self.dense, 1 - self.options.sparsity
        return {
            "experts": self.options.experts,
            "parameters_after_tuning": dense.parameters + round(left * self.planned().linear_parameters),
            "parameters_as_published": simoe_parameters(dense.parameters, self.options.sparsity),
        }

    def notes(self, config: dict[str, Any]) -> list[str]:
        return [
            "tune closes masks and leaves out what no expert needs; until then the file is as large as two models",
            "only transformers, after `import moetool`, runs interpolated experts",
        ]


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


def simoe_parameters(dense: int, sparsity: float) -> int:
    """Parameters of a SIMoE model as its Table 3 counts them: the share of open mask elements of all the dense model's
    numbers, embeddings too, although only linear layers have masks and columns stay if any expert needs them."""
    return dense + round((1 - sparsity) * dense)
