"""Routers of a converted model: how many experts they tell apart, in which layers, and what they start as."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from moetool.convert.layers import parse_layers
from moetool.convert.parts import Converted
from moetool.convert.stage import Conversion, ConversionOptions, MeasuredModel
from moetool.errors import UsageError
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import DenseSource, Job
from moetool.job.options import TEXTS, Listed
from moetool.job.result import CalibrationFacts
from moetool.numerics.seeding import linear_std
from moetool.upcycle.router import centred, decorrelated, random_router

Rows = Callable[[int], Tensor]  # of a layer: the router `[experts, hidden]`


@dataclass(frozen=True)
class StartingRows:
    """First values of all routers, and the text that they were fitted on, if any."""

    rows: Rows
    calibration: CalibrationFacts | None = None


class RoutedOptions(ConversionOptions):
    """Options of upcycling with a router: number of experts, and in which layers."""

    experts: int | None = Field(8, ge=2, le=10_000, description="Routed experts per layer.")
    top_k: int = Field(2, ge=1, description="Experts per token.")
    layers: Listed = Field("all", description="Layers that get experts: all, every:N, or a list such as 0,4,8.")
    router_std: float | None = Field(
        None, gt=0, description="Standard deviation of the routers' weights [default: 1/√(3·hidden)]."
    )
    center_router: bool | None = Field(
        None, description="Fit the routers to the calibration text, or to the bundled one where none is given, so that "
        "no expert starts without tokens [default: on where a text is given]."
    )  # fmt: skip
    calibration: Listed | None = Field(None, description=f"Text for the routers and for the proof: {TEXTS}.")


RoutedT = TypeVar("RoutedT", bound=RoutedOptions, default=RoutedOptions)


class RoutedConversion(Conversion[RoutedT]):
    """A dense model into one whose routers start fresh, or fitted to a text."""

    method_of: ClassVar[str | None] = "upcycle"
    is_parallel: ClassVar[bool] = True

    @abstractmethod
    def routed_by(self, rows: Rows) -> Converted:
        """Return the upcycled model, whose routers start with the rows that `rows` gives by layer."""

    @property
    def copies(self) -> int:
        """Number of rows of each layer's router, one per copy of the feed-forward network.

        Raises:
            UsageError: `--experts` was not given.
        """
        if self.options.experts is None:
            raise UsageError("--experts is required.")
        return int(self.options.experts)

    @property
    def measures(self) -> bool:
        """Whether routers are fitted to a text, which they are by default if one is given."""
        asked = self.options.center_router
        return self.options.calibration is not None if asked is None else asked

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the decoder layers whose feed-forward network becomes experts, by `--layers`."""
        return parse_layers(self.options.layers, self.dense.layers, self.dense.ffn_layers)

    def fresh(self) -> Rows:
        """A function from the layer's number to random router weights `[copies, hidden]` fp32, drawn from the seed."""
        options, dense, copies = self.options, self.dense, self.copies
        std = options.router_std or linear_std(dense.hidden)
        return lambda layer: random_router(copies, dense.hidden, std, options.seed, layer)

    def rows(self, job: Job[DenseSource]) -> StartingRows:
        """First values of the routers: random, and centered on the text if there is one.

        To center them, the calibration text runs through the dense model, and rows are fitted to its FFNs' inputs.
        """
        fresh = self.fresh()
        if not self.measures:
            if self.options.center_router is None:
                job.progress.log("Routers start at random: --center-router fits them to a text, for more even routing.")
            return StartingRows(fresh)
        from moetool.convert.inputs import InputMoments, watched_inputs

        calibrated = CalibratedJob(job, self.options)

        def measure(index: int, layer: torch.nn.Module) -> dict[str, Tensor]:
            moments = InputMoments(1, self.dense.hidden)
            ffn = layer.get_submodule(self.dense.architecture.ffn)
            with watched_inputs(ffn, lambda inputs: moments.add(0, inputs)):
                calibrated.sweep.forward(index, layer)
            moments.reduce(job.ranks)
            return {"rows": decorrelated(centred(fresh(index), moments.mean), moments.covariance)}

        fitted = calibrated.measured("router", measure, self.layers)
        return StartingRows(lambda layer: fitted[layer]["rows"], calibrated.facts)

    @property
    def needs_text(self) -> bool:
        return bool(self.options.center_router)

    def planned(self) -> Converted:
        if self.options.top_k > self.copies:
            raise UsageError(f"--top-k {self.options.top_k}: there are only {self.copies} experts.")
        return self.routed_by(self.fresh())

    def converted(self, job: Job[DenseSource]) -> MeasuredModel:
        found = self.rows(job)
        return MeasuredModel(self.routed_by(found.rows), found.calibration)
