"""Routers of a converted model: how many experts they tell apart, in which layers, and what they start as."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor

from moetool.checkpoint.files import save_tensors
from moetool.convert.stage import ConversionOptions
from moetool.errors import UsageError
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import DenseSource, Job
from moetool.job.options import TEXTS
from moetool.job.result import CalibrationFacts
from moetool.numerics.seeding import linear_std
from moetool.runtime.dense import DenseModel
from moetool.upcycle.router import centred, decorrelated, random_router

Rows = Callable[[int], Tensor]  # of a layer: the router `[experts, hidden]`


@dataclass(frozen=True)
class StartingRows:
    """What routers start as, and on which text they were fitted, if they were."""

    rows: Rows
    calibration: CalibrationFacts | None = None


class RoutedOptions(ConversionOptions):
    """How many experts, and where."""

    experts: int | None = Field(8, ge=2, le=10_000, description="Routed experts per layer.")
    top_k: int = Field(2, ge=1, description="Experts per token.")
    layers: str = Field("all", description="Layers that get experts: all, every:N, or a list such as 0,4,8.")
    router_std: float | None = Field(
        None, gt=0, description="Standard deviation of the routers' weights [default: 1/√(3·hidden)]."
    )
    center_router: bool = Field(
        False, description="Fit the routers to the calibration text: without its mean input, and with logits that vary "
        "equally, so that no expert starts without tokens."
    )  # fmt: skip
    calibration: str | None = Field(None, description=f"Text for --center-router and for the proof: {TEXTS}")


def check_routing(options: RoutedOptions, experts: int) -> None:
    """Raise `UsageError` for a number of experts per token, or for routers, that cannot be made."""
    if options.top_k > experts:
        raise UsageError(f"--top-k {options.top_k}: there are only {experts} experts.")
    if options.center_router and options.calibration is None:
        raise UsageError("--center-router needs a calibration text: --calibration FILE.")


def fresh_rows(options: RoutedOptions, dense: DenseModel, experts: int) -> Rows:
    """Gives every layer's fresh router `[experts, hidden]` fp32."""
    std = options.router_std or linear_std(dense.hidden)
    return lambda layer: random_router(experts, dense.hidden, std, options.seed, layer)


def starting_rows(job: Job[DenseSource], options: RoutedOptions, layers: Sequence[int], fresh: Rows) -> StartingRows:
    """What the routers of `layers` start as: `fresh`, without a preference if --center-router was asked for.

    For that the calibration text runs through the dense model, and rows are fitted to the inputs of its FFNs.
    """
    if not options.center_router:
        return StartingRows(fresh)
    from moetool.convert.inputs import InputMoments, watched_inputs

    dense = job.source.dense

    def file(layer: int) -> Path:
        return job.work / f"router-{layer:05d}.safetensors"

    def rows(layer: int) -> Tensor:
        return load_file(file(layer))["rows"]

    calibrated = CalibratedJob(job, options)

    def visit(index: int, layer: torch.nn.Module) -> None:
        moments = InputMoments(1, dense.hidden)
        with watched_inputs(layer.get_submodule(dense.architecture.ffn), lambda inputs: moments.add(0, inputs)):
            calibrated.sweep.forward(index, layer)
        moments.reduce(job.ranks)
        fitted = decorrelated(centred(fresh(index), moments.mean), moments.covariance)
        if job.ranks.is_first:
            save_tensors(file(index), {"rows": fitted})

    calibrated.forward_visiting(visit, layers)
    job.meet()
    return StartingRows(rows, calibrated.facts)
