"""Upcycling to masks on one shared delta, by which tuning finds the experts and where to put them (SIMoE)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from moetool.checkpoint.sizes import Part
from moetool.checkpoint.writer import TensorSpec
from moetool.convert.parts import REST, Customized, Made
from moetool.convert.stage import Conversion, ConversionOptions, MeasuredModel
from moetool.errors import InvalidInputError
from moetool.format.kinds.base import PLACEHOLDER, Shape
from moetool.format.kinds.simoe import DELTA, MASKS, MULTIPLIER, SimoeSpec
from moetool.job.job import DenseSource, Job
from moetool.job.options import RunOptions
from moetool.job.result import Json
from moetool.numerics.hard_concrete import log_phi_for
from moetool.numerics.seeding import generator, linear_std, uniform

# Of a mask element, before it is trained: the probability of zero, and the noise that tells experts apart.
CLOSED, NOISE = 0.05, 0.05


class SimoeOptions(ConversionOptions):
    """Options of SIMoE: number of experts, router width and target sparsity."""

    experts: int = Field(8, ge=2, description="Masks per linear layer.")
    router_width: int = Field(64, ge=1, description="Width of the router's hidden layer.")
    sparsity: Part = Field(0.75, ge=0, lt=1, description="Share of the masks' elements that tuning is to close.")


class Simoe(Conversion[SimoeOptions]):
    """Sparse Interpolated Mixture-of-Experts: a shared delta on every linear layer, and masks as experts."""

    name: ClassVar[str] = "simoe"
    summary: ClassVar[str] = "masks on one shared delta per linear layer; training finds which and where"
    options_type: ClassVar[type[RunOptions]] = SimoeOptions
    method_of: ClassVar[str | None] = "upcycle"
    is_parallel: ClassVar[bool] = True

    def planned(self) -> "Interpolated":
        options, architecture = self.options, self.dense.architecture
        if architecture.is_transposed:
            raise InvalidInputError(
                f"SIMoE takes linear layers with weights [out, in], and those of {architecture.name} are [in, out] "
                "(Conv1D). Other methods of upcycle take it."
            )
        if unread := next((name for name in self.dense.checkpoint.tensors if name.endswith("dt_proj.weight")), None):
            raise InvalidInputError(
                f"SIMoE takes linear layers that are called, and {architecture.name} computes with {unread} itself. "
                "Other methods of upcycle take it."
            )
        spec = SimoeSpec(
            experts=options.experts, router_width=options.router_width, sparsity=options.sparsity, channels=None
        )
        return Interpolated(dense=self.dense, dtype=self.new_dtype, seed=options.seed, spec=spec)

    def converted(self, job: Job[DenseSource]) -> MeasuredModel:
        return MeasuredModel(self.planned())

    def details(self) -> dict[str, Json]:
        dense, left = self.dense, 1 - self.options.sparsity
        return {
            "experts": self.options.experts,
            "parameters_after_tuning": dense.parameters + round(left * self.planned().linear_parameters),
            "parameters_as_published": simoe_parameters(dense.parameters, self.options.sparsity),
        }

    def notes(self, config: dict[str, object]) -> list[str]:
        return [
            "tune closes masks and leaves out what no expert needs; until then the file is as large as two models",
            "only transformers runs interpolated experts, after `import moetool`",
        ]


@dataclass(frozen=True, kw_only=True)
class Interpolated(Customized[SimoeSpec]):
    """A dense model with a shared delta of zero and masks on every linear layer of its decoder layers."""

    def unit(self, layer: int, names: list[str]) -> Iterator[Made]:
        if layer == REST:
            yield from map(self.copied, names)
            yield from self._router()
            return
        yield from self.kept(names)
        for site in sorted({name.rpartition(".")[0] for name in names} & self._sites):
            rows, columns = self._shape(site)
            shapes = self.spec.tensors(rows, columns)
            yield self.zeros(f"{site}.weight", PLACEHOLDER)
            yield self.zeros(f"{site}.{DELTA}", shapes[DELTA])
            masks = TensorSpec(f"{site}.{MASKS}", torch.float32, shapes[MASKS])
            yield Made(masks, partial(self._masks, site, shapes[MASKS]))

    @cached_property
    def _sites(self) -> set[str]:
        return set(self.spec.sites(self.dense.architecture, self.dense.checkpoint.shapes))

    def _shape(self, site: str) -> Shape:
        return self.dense.checkpoint.info(f"{site}.weight").shape

    def _masks(self, site: str, shape: Shape) -> Tensor:
        noise = torch.randn(shape, generator=generator(self.seed, "masks", site))
        return log_phi_for(CLOSED) + NOISE * noise

    def _router(self) -> Iterator[Made]:
        """Two fresh linear layers, the second without a preference."""
        prefix, shapes = self.spec.router_prefix(self.dense.architecture), self.spec.router_tensors(self.dense.hidden)
        for name in ("first", "second"):
            shape = shapes[f"{name}.weight"]
            draw = partial(uniform, shape, linear_std(shape[1]), generator(self.seed, "router", name))
            yield self.joined(f"{prefix}{name}.weight", shape, [draw])
            yield self.zeros(f"{prefix}{name}.bias", shapes[f"{name}.bias"])
        multiplier = TensorSpec(prefix + MULTIPLIER, torch.float32, shapes[MULTIPLIER])
        yield Made(multiplier, partial(torch.zeros, multiplier.shape))

    @property
    def linear_parameters(self) -> int:
        """Number of parameters of all linear layers whose deltas are masked."""
        return sum(math.prod(self._shape(site)) for site in self._sites)


def simoe_parameters(dense: int, sparsity: float) -> int:
    """Parameters of a SIMoE model as its Table 3 counts them: the share of open mask elements of all the dense model's
    numbers, embeddings too, although only linear layers have masks and columns stay if any expert needs them."""
    return dense + round((1 - sparsity) * dense)
