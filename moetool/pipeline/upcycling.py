"""What all ways of upcycling to a mixture of whole FFNs share: its shape, its family, its routers."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor

from moetool.checkpoint.files import save_tensors
from moetool.conversion.dense import DenseModel
from moetool.conversion.experts import Experts
from moetool.conversion.layers import parse_layers
from moetool.conversion.lint import lint
from moetool.conversion.parts import Converted
from moetool.conversion.router import centred, decorrelated, default_std, random_router
from moetool.conversion.targets import Target, choose_target
from moetool.conversion.upcycling import Upcycled
from moetool.errors import UsageError
from moetool.pipeline.calibrated import CalibratedJob
from moetool.pipeline.conversion import Conversion, ConversionOptions
from moetool.pipeline.job import DenseSource, Job
from moetool.pipeline.options import RunOptions
from moetool.representations.layout import LayerLayout
from moetool.representations.mixture import Mixture, Shared

PROOF_WINDOWS, PROOF_LENGTH = 4, 64


class UpcycleOptions(ConversionOptions):
    """How many experts, where, and in which family."""

    experts: int | None = Field(8, ge=2, description="Routed experts per layer.")
    top_k: int = Field(2, ge=1, description="Experts per token.")
    layers: str = Field("all", description="Layers that become mixtures: all, every:N, or a list such as 0,4,8.")
    shared: Shared = Field(
        "none", description="The original FFN as a shared expert: half of the output, or as XFT or Med-MoE weigh it."
    )
    target: str = Field(
        "auto", description="Family to write: mixtral, qwen2_moe, … or moetool for its own module (auto: the first "
        "that can express the model)."
    )  # fmt: skip
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


class Upcycle(Conversion[UpcycleOptions]):
    """A dense model into a mixture of experts."""

    options_type: ClassVar[type[RunOptions]] = UpcycleOptions
    method_of: ClassVar[str | None] = "upcycle"

    @abstractmethod
    def experts(self) -> Experts:
        """What every expert starts as."""

    @property
    def copies(self) -> int:
        """Experts of the size of the dense FFN per layer."""
        if self.options.experts is None:
            raise UsageError("--experts is required.")
        return self.options.experts

    @property
    def preserves(self) -> bool:
        return self.options.shared != "med"

    @property
    def granularity(self) -> int:
        """Pieces into which each of them is cut."""
        return 1

    def rest(self) -> Sequence[DenseModel]:
        """Models whose mean everything outside the experts is."""
        return [self.dense]

    @cached_property
    def mixture(self) -> Mixture:
        """What is to be made. Raises `UsageError` for numbers that do not fit."""
        options, dense = self.options, self.dense
        if options.top_k > self.copies:
            raise UsageError(f"--top-k {options.top_k}: there are only {self.copies} experts.")
        return Mixture(
            experts=self.copies * self.granularity,
            top_k=options.top_k * self.granularity,
            intermediate=dense.intermediate // self.granularity,
            layers=parse_layers(options.layers, dense.layers),
            of=dense.layers,
            shared=options.shared,
        )

    @cached_property
    def target(self) -> Target:
        """The family to write."""
        narrow = self.dense.architecture.norm_offset and self.stored_dtype.itemsize < 4
        features = (*self.dense.features, *self.mixture.features, *(("narrow_norms",) if narrow else ()))
        return choose_target(self.options.target, features)

    def upcycled(self, router: Callable[[int], Tensor]) -> Upcycled:
        """The result, tensor by tensor."""
        return Upcycled(
            dense=self.dense,
            target=self.target,
            mixture=self.mixture,
            experts=self.experts(),
            router=router,
            rest=self.rest(),
            dtype=None if self.options.dtype == "auto" else self.stored_dtype,
            seed=self.options.seed,
            layouts=self.layouts(),
        )

    def layouts(self) -> Mapping[int, LayerLayout]:
        """By layer, how experts are stored if they are differences to one base; none if they are not."""
        return {}

    def random_rows(self, layer: int) -> Tensor:
        """A fresh router `[experts, hidden]`."""
        std = self.options.router_std or default_std(self.dense.hidden)
        return random_router(self.copies, self.dense.hidden, std, self.options.seed, layer)

    def planned(self) -> Converted:
        if self.options.center_router and self.options.calibration is None:
            raise UsageError("--center-router needs a calibration text: --calibration FILE.")
        return self.upcycled(self.random_rows)

    def details(self) -> dict[str, Any]:
        return {
            "target": self.target.name,
            "experts": self.mixture.experts,
            "top_k": self.mixture.top_k,
            "moe_layers": len(self.mixture.layers),
        }

    @property
    def measures(self) -> bool:
        return self.options.center_router

    def converted(self, job: Job[DenseSource]) -> Converted:
        return self.upcycled(self.routers(job))

    def record(self) -> dict[str, Any]:
        return {
            "upcycled": {
                "source_config": self.dense.checkpoint.config,
                "target": self.target.name,
                "mixture": self.mixture.to_config(),
                "granularity": self.granularity,
                "dtype": str(self.dense.dtype).removeprefix("torch."),
            }
        }

    def notes(self, config: dict[str, Any]) -> list[str]:
        return lint(self.target, self.dense, self.mixture, config)

    def run(self, job: Job[DenseSource]) -> dict[str, Any]:
        return {"target": self.target.name, **super().run(job)}

    def routers(self, job: Job[DenseSource]) -> Callable[[int], Tensor]:
        """Gives the router of every layer, `[experts, hidden]`, pieces included."""
        copies = self._fitted_rows(job) if self.options.center_router else self.random_rows
        return lambda layer: copies(layer).repeat_interleave(self.granularity, 0)

    def _fitted_rows(self, job: Job[DenseSource]) -> Callable[[int], Tensor]:
        """Fresh routers without a preference: fitted to the inputs that the FFNs have on the calibration text."""
        from moetool.conversion.inputs import InputMoments, watched_inputs

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

        calibrated.forward_visiting(visit, self.mixture.layers)
        return lambda layer: load_file(file(layer))["rows"]
