"""Conversions with routers: how many experts, in which layers, and what the routers start as."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor

from moetool.checkpoint.files import save_tensors
from moetool.convert.layers import parse_layers
from moetool.convert.parts import Converted
from moetool.convert.stage import Conversion, ConversionOptions
from moetool.errors import UsageError
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import DenseSource, Job
from moetool.job.stage import OptionsT
from moetool.numerics.seeding import linear_std
from moetool.upcycle.router import centred, decorrelated, random_router


class RoutedOptions(ConversionOptions):
    """How many experts, and where."""

    experts: int | None = Field(8, ge=2, le=10_000, description="Routed experts per layer.")
    top_k: int = Field(2, ge=1, description="Experts per token.")
    layers: str = Field("all", description="Layers that become mixtures: all, every:N, or a list such as 0,4,8.")
    router_std: float | None = Field(
        None, gt=0, description="Standard deviation of the routers' weights [default: 1/√(3·hidden)]."
    )
    center_router: bool = Field(
        False, description="Fit the routers to the calibration text: without its mean input, and with logits that vary "
        "equally, so that no expert starts without tokens."
    )  # fmt: skip
    calibration: str | None = Field(
        None, description="Text for --center-router and for the proof: a .txt, .jsonl or .parquet file, a folder of "
        "them, or a hub data set name[:config[:split[:column]]]; several with commas."
    )  # fmt: skip


class RoutedConversion(Conversion[OptionsT]):
    """A dense model into one whose layers route tokens to experts."""

    @abstractmethod
    def with_router(self, router: Callable[[int], Tensor]) -> Converted:
        """The result, given the rows `[experts, hidden]` of every layer's router."""

    @property
    def copies(self) -> int:
        """Experts per layer that a router tells apart."""
        if self.options.experts is None:
            raise UsageError("--experts is required.")
        return int(self.options.experts)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers that become mixtures, ascending."""
        return parse_layers(self.options.layers, self.dense.layers)

    @property
    def measures(self) -> bool:
        return bool(self.options.center_router)

    def planned(self) -> Converted:
        if self.options.top_k > self.copies:
            raise UsageError(f"--top-k {self.options.top_k}: there are only {self.copies} experts.")
        if self.options.center_router and self.options.calibration is None:
            raise UsageError("--center-router needs a calibration text: --calibration FILE.")
        return self.with_router(self.random_rows)

    def converted(self, job: Job[DenseSource]) -> Converted:
        return self.with_router(self.routers(job))

    def random_rows(self, layer: int) -> Tensor:
        """A fresh router `[experts, hidden]`."""
        std = self.options.router_std or linear_std(self.dense.hidden)
        return random_router(self.copies, self.dense.hidden, std, self.options.seed, layer)

    def routers(self, job: Job[DenseSource]) -> Callable[[int], Tensor]:
        """Gives the router of every layer, `[experts, hidden]`."""
        return self._fitted_rows(job) if self.options.center_router else self.random_rows

    def _fitted_rows(self, job: Job[DenseSource]) -> Callable[[int], Tensor]:
        """Fresh routers without a preference: fitted to the inputs that the FFNs have on the calibration text."""
        from moetool.convert.inputs import InputMoments, watched_inputs

        calibrated = CalibratedJob(job, self.options)
        sweep, ffn = calibrated.sweep, self.dense.architecture.ffn

        def file(layer: int) -> Path:
            return job.work / f"router-{layer:05d}.safetensors"

        def visit(index: int, layer: torch.nn.Module) -> None:
            moments = InputMoments(1, self.dense.hidden)
            with watched_inputs(layer.get_submodule(ffn), lambda inputs: moments.add(0, inputs)):
                sweep.forward(index, layer)
            rows = decorrelated(centred(self.random_rows(index), moments.mean), moments.covariance)
            save_tensors(file(index), {"rows": rows})

        calibrated.forward_visiting(visit, self.layers)
        return lambda layer: load_file(file(layer))["rows"]
