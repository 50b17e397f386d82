"""What all ways of upcycling share: plan, routers, writing, and the proof that the result computes what it should."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor

from moetool.architectures import find_architecture
from moetool.calibration.data import load_tokenizer
from moetool.checkpoint.files import save_tensors
from moetool.checkpoint.reader import CONFIG, Checkpoint
from moetool.conversion.dense import DenseModel
from moetool.conversion.experts import Experts
from moetool.conversion.layers import parse_layers
from moetool.conversion.lint import lint
from moetool.conversion.router import centred, decorrelated, default_std, random_router
from moetool.conversion.sample import sample_tokens
from moetool.conversion.targets import Target, choose_target
from moetool.conversion.upcycling import Upcycled
from moetool.errors import InvalidInputError, UsageError, VerificationError
from moetool.pipeline.calibrated import CalibratedJob, calibration_windows
from moetool.pipeline.job import DenseSource, Job, Source
from moetool.pipeline.options import RunOptions, TextOptions
from moetool.pipeline.output import ShardPlan, write_checkpoint
from moetool.pipeline.plan import CalibrationCost, Plan
from moetool.pipeline.progress import phase
from moetool.pipeline.stage import Stage
from moetool.representations.layout import LayerLayout
from moetool.representations.mixture import Mixture, Shared

PROOF_WINDOWS, PROOF_LENGTH = 4, 64


class UpcycleOptions(RunOptions, TextOptions):
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
    dtype: Literal["auto", "float32"] = Field("auto", description="To store weights in (auto: as the source has them).")
    proof: bool = Field(
        True, description="Run both models on real tokens before it is done, and refuse a result that differs."
    )
    calibration: str | None = Field(
        None, description="Text for --center-router and for the proof: a .txt, .jsonl or .parquet file, a folder of "
        "them, or a hub data set name[:config[:split[:column]]]; several with commas."
    )  # fmt: skip
    samples: int = Field(8, ge=1, description="Windows of calibration text.")
    sequence_length: int = Field(512, ge=2, description="Tokens per window; by default no more than the context.")


class Upcycle(Stage[UpcycleOptions, DenseSource]):
    """A dense model into a mixture of experts."""

    options_type: ClassVar[type[RunOptions]] = UpcycleOptions
    source_type: ClassVar[type[Any]] = DenseSource
    method_of: ClassVar[str | None] = "upcycle"

    @property
    def dense(self) -> DenseModel:
        """The model that gives config and tokenizer."""
        return self.source.dense

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
    def granularity(self) -> int:
        """Pieces into which each of them is cut."""
        return 1

    @property
    def preserves(self) -> bool:
        """Whether the result computes what the dense model computes."""
        return self.options.shared != "med"

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the experts in the result."""
        return self.dense.dtype if self.options.dtype == "auto" else torch.float32

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

    # What it will cost.

    def plan(self) -> Plan:
        options, model = self.options, self.upcycled(self.random_rows)
        if options.center_router and options.calibration is None:
            raise UsageError("--center-router needs a calibration text: --calibration FILE.")
        shards = _shards(model, options.shard_size)
        parameters = model.parameters()
        return Plan(
            stage=self.name,
            input_bytes=self.source.checkpoint.weight_bytes,
            output_bytes=shards.nbytes,
            scratch_bytes=self._scratch_bytes(),
            memory_bytes=self._memory_bytes(),
            details={
                "target": self.target.name,
                "experts": self.mixture.experts,
                "top_k": self.mixture.top_k,
                "moe_layers": len(self.mixture.layers),
                "parameters": parameters["total"],
                "active_parameters": parameters["active"],
                "added_parameters": parameters["added"],
            },
        )

    @property
    def measures(self) -> bool:
        """Whether a text runs through the dense model before anything is written."""
        return self.options.center_router

    def _scratch_bytes(self) -> int:
        cost = CalibrationCost(self.options.samples, self.options.sequence_length, 4)
        return 2 * cost.boundary_bytes(self.dense.hidden) if self.measures else 0

    def _memory_bytes(self) -> int:
        runs = self.options.proof or self.measures
        cost = CalibrationCost(self.options.samples, self.options.sequence_length, 4)
        moments = 4 * 8 * self.dense.hidden**2 if self.measures else 0
        return cost.dense_memory_bytes(self.dense, runs=runs, calibrated=self.measures) + moments

    # Doing it.

    def run(self, job: Job[DenseSource]) -> dict[str, Any]:
        options = self.options
        router = self.routers(job)
        model = self.upcycled(router)
        units = dict(model.units())
        config = model.config()
        job.record["upcycled"] = {
            "source_config": self.dense.checkpoint.config,
            "target": self.target.name,
            "mixture": self.mixture.to_config(),
            "granularity": self.granularity,
            "dtype": str(self.dense.dtype).removeprefix("torch."),
        }
        proof: dict[str, Any] = {}
        tokens = self._tokens() if options.proof else None  # before anything is written, in case there are none
        write_checkpoint(
            job,
            _shards(model, options.shard_size),
            lambda layer: ((made.spec.name, made.make()) for made in units[layer]),
            config=config,
            seed=options.seed,
            check=None if tokens is None else lambda made: proof.update(self._proved(job, made, tokens)),
        )
        told: dict[str, Any] = {"target": self.target.name, "parameters": model.parameters()}
        if proof:
            told["proof"] = proof
        told["notes"] = lint(self.target, self.dense, self.mixture, config)
        return told

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

    # Evidence.

    def _tokens(self) -> Tensor:
        options, config = self.options, self.dense.config
        length = min(PROOF_LENGTH, int(getattr(config, "max_position_embeddings", PROOF_LENGTH)))
        if options.calibration is not None:
            short = options.model_copy(update={"samples": PROOF_WINDOWS, "sequence_length": length})
            return calibration_windows(self.source, short)
        try:
            tokenizer = load_tokenizer(self.dense.checkpoint.path)
        except InvalidInputError:
            tokenizer = None
        return sample_tokens(tokenizer, int(config.vocab_size), PROOF_WINDOWS, length)

    def _proved(self, job: Job[DenseSource], made: Checkpoint, tokens: Tensor) -> dict[str, Any]:
        """Whether both models make the same of some tokens. Raises `VerificationError` if it is not."""
        from moetool.calibration.streaming import StreamedModel
        from moetool.conversion import proof

        has_reader = self.target.architecture is not None or self.dense.is_fusable
        family = find_architecture(made.config) if has_reader else self.dense.architecture
        with phase(job.progress, "Compare with the dense model", 2 * self.dense.layers):
            dense = proof.run(
                StreamedModel(self.dense.checkpoint, self.dense.architecture, torch.float32, job.device),
                tokens,
                job.progress.advance,
            )
            mixture = proof.run(
                StreamedModel(made, family, torch.float32, job.device, experts_on_disk=True),
                tokens,
                job.progress.advance,
            )
        found = proof.compare(dense, mixture, tokens)
        error = found["relative_logit_error"]
        if not error < float("inf") or (self.preserves and error > proof.TOLERANCE):
            raise VerificationError(
                f"The mixture's logits differ from the dense model's by {error:.2g} of their size, more than "
                f"{proof.TOLERANCE:g}: {self.target.name} does not compute what this model computes. "
                f"{job.output} has no {CONFIG}, so that nothing loads it."
            )
        return {**found, "preserves": self.preserves}

    def verify(self, output: Path) -> dict[str, Any]:
        made = Checkpoint.open(output)
        if self.target.architecture is not None or self.dense.is_fusable:
            Source.of(made)
        return {"bytes_before": self.source.checkpoint.weight_bytes, "bytes_after": made.weight_bytes}


def _shards(model: Upcycled, shard_size: int) -> ShardPlan:
    return ShardPlan(((layer, [made.spec for made in unit]) for layer, unit in model.units() if unit), shard_size)
