"""Base class of conversions of a dense model: plan, writing, and the proof that the result computes what it should."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from moetool.calibration.mixing import TextCounts
from moetool.calibration.opening import Tokenizer
from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.manifest import Provenance
from moetool.checkpoint.names import CONFIG
from moetool.checkpoint.reader import Checkpoint
from moetool.convert.parts import Converted
from moetool.convert.results import Activations, ConversionResult, Parameters, Proof
from moetool.costs.building_blocks import dense_size
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.phases import Phases, proof_phase, rewriting_phases, router_phase
from moetool.errors import InvalidInputError, VerificationError
from moetool.format.families import architecture_of, is_opaque
from moetool.format.kinds.base import Counts
from moetool.job.job import DenseSource, Input, Job, Source
from moetool.job.options import TEXTS, Listed, RunOptions, TextOptions
from moetool.job.own_text import own_text
from moetool.job.plan import Plan, text_cost
from moetool.job.progress import phase
from moetool.job.result import CalibrationFacts, Json, Sizes
from moetool.job.shards import ShardPlan
from moetool.job.stage import Stage
from moetool.job.windows import calibration_windows
from moetool.job.writing import write_checkpoint
from moetool.runtime.dense import DenseModel

PROOF_WINDOWS, PROOF_LENGTH = 4, 64


class ConversionOptions(RunOptions, TextOptions):
    """Options of all conversions: dtype of the weights, and the text of the proof."""

    dtype: Literal["auto", "float32"] = Field("auto", description="To store weights in (auto: as the source has them).")
    proof: bool = Field(
        True, description="At the end run both models on a text, and refuse a result whose outputs differ."
    )
    calibration: Listed | None = Field(None, description=f"Text for the proof: {TEXTS}")
    samples: int = Field(8, ge=1, description="Windows of calibration text.")
    sequence_length: int = Field(512, ge=2, description="Tokens per window; by default no more than the context.")


ConversionT = TypeVar("ConversionT", bound=ConversionOptions)


@dataclass(frozen=True)
class MeasuredModel:
    """A result for which whatever it needs has been measured.

    Attributes:
        model: the result.
        calibration: on which text, if there was one.
        activations: by layer, where neurons were measured.
    """

    model: Converted
    calibration: CalibrationFacts | None = None
    activations: Mapping[int, Activations] = field(default_factory=dict)


class Conversion(Stage[ConversionT, DenseSource]):
    """A stage that turns a dense model into another that computes the same function."""

    source_type: ClassVar[type[Input]] = DenseSource
    takes_encoders: ClassVar[bool] = False

    def __init__(self, source: DenseSource, options: ConversionT) -> None:
        super().__init__(source, options)
        architecture, model_type = source.dense.architecture, source.checkpoint.config["model_type"]
        if not self.takes_encoders and architecture.is_encoder:
            raise InvalidInputError(
                f"This model ({model_type}) only encodes. Upcycling needs a decoder: a causal language model. "
                "moefy takes encoders."
            )

    @property
    def dense(self) -> DenseModel:
        """The dense model whose config and tokenizer the result takes over."""
        return self.source.dense

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in which experts are written: the dense model's, or fp32 if that was asked for."""
        return self.dense.dtype if self.options.dtype == "auto" else torch.float32

    @property
    def new_dtype(self) -> torch.dtype | None:
        """The dtype to store everything in; `None` keeps each tensor's own."""
        return None if self.options.dtype == "auto" else self.stored_dtype

    @property
    def preserves(self) -> bool:
        """Whether the converted model is meant to compute exactly what the dense model computes, which the proof then
        checks."""
        return True

    @property
    def measures(self) -> bool:
        """Whether the calibration text runs through the dense model before anything is written."""
        return False

    @property
    def due_windows(self) -> TextCounts | None:
        return super().due_windows if self.measures else None

    @abstractmethod
    def planned(self) -> Converted:
        """The converted model as far as headers determine it, without any weights read."""

    @abstractmethod
    def converted(self, job: Job[DenseSource]) -> MeasuredModel:
        """Measure what the method needs and return the converted model, with a record of what was measured."""

    @abstractmethod
    def details(self) -> dict[str, Json]:
        """Facts about the result that a plan lists beside its costs, by name."""

    def provenance(self) -> Provenance:
        """Record of the dense model for the manifest, if the conversion can be undone."""
        return Provenance()

    def notes(self, config: dict[str, object]) -> list[str]:
        """Sentences that a user of the result with this config has to know."""
        return []

    # What it will cost.

    def plan(self) -> Plan:
        planned = self.planned()
        parameters, output = planned.parameters(), self._shards(planned).nbytes
        return Plan(
            stage=self.name,
            input_bytes=self.source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=self._scratch_bytes(),
            memory_bytes=self._memory_bytes(),
            phases=self._phases(parameters, output),
            details={
                **self.details(),
                "parameters": parameters.total,
                "active_parameters": parameters.active,
                "added_parameters": parameters.added,
            },
        )

    def _phases(self, parameters: Counts, output: int) -> Phases:
        writing = rewriting_phases(dense_size(self.dense), output)
        proof = (
            (proof_phase(CalibrationCost(PROOF_WINDOWS, PROOF_LENGTH, 4), self.dense, parameters, output),)
            if self.options.proof
            else ()
        )
        return (*self.measuring(), *writing, *proof)

    def measuring(self) -> Phases:
        """Phases of work on the calibration text before anything is written."""
        if not self.measures:
            return ()
        cost = CalibrationCost(self.options.samples, self.options.sequence_length, 4)
        return (router_phase(cost, self.dense),)

    def _scratch_bytes(self) -> int:
        cost = text_cost(self.options, torch.float32, self.dense.dtype)
        return cost.forward_bytes(self.dense.hidden) if self.measures else 0

    def _memory_bytes(self) -> int:
        runs = self.options.proof or self.measures
        cost = text_cost(self.options, torch.float32, self.dense.dtype)
        moments = 4 * 8 * self.dense.hidden**2 if self.measures else 0
        return cost.dense_memory_bytes(self.dense, runs=runs, calibrated=self.measures) + moments

    def _shards(self, model: Converted) -> ShardPlan:
        units = ((layer, [made.spec for made in unit]) for layer, unit in model.units() if unit)
        return ShardPlan(units, self.options.shard_size)

    # Doing it.

    def run(self, job: Job[DenseSource]) -> ConversionResult:
        measured = self.converted(job)
        model = measured.model
        units = dict(model.units())
        config = model.config()
        proofs: list[Proof] = []
        tokens = self._tokens(job) if self.options.proof else None  # before anything is written, in case there are none
        write_checkpoint(
            job,
            self._shards(model),
            lambda layer: ((made.spec.name, made.make()) for made in units[layer]),
            config=config,
            provenance=self.provenance(),
            calibration=measured.calibration,
            layers=lambda: measured.activations,
            check=None if tokens is None else lambda made: proofs.append(self._proved(job, made, tokens)),
        )
        return ConversionResult(
            calibration=measured.calibration,
            parameters=Parameters(*model.parameters()),
            proof=proofs[0] if proofs else None,
            notes=self.notes(config),
            activations=Activations.mean(measured.activations.values()) if measured.activations else None,
        )

    # Evidence.

    def _tokens(self, job: Job[DenseSource]) -> Tensor:
        options, config = self.options, self.dense.config
        length = min(PROOF_LENGTH, int(getattr(config, "max_position_embeddings", PROOF_LENGTH)))
        if options.calibration is not None:
            short = options.model_copy(update={"samples": PROOF_WINDOWS, "sequence_length": length, "mix": 0.0})
            return calibration_windows(self.source, short, own_text(job, short))
        try:
            tokenizer = load_tokenizer(self.dense.checkpoint.path)
        except InvalidInputError:
            tokenizer = None
        return sample_tokens(tokenizer, int(config.vocab_size), PROOF_WINDOWS, length)

    def _proved(self, job: Job[DenseSource], made: Checkpoint, tokens: Tensor) -> Proof:
        """Whether both models make the same of some tokens. Raises `VerificationError` if it is not."""
        from moetool.calibration.streaming import StreamedModel
        from moetool.convert import proof

        family = self.dense.architecture if is_opaque(made.config) else architecture_of(made.config)
        with phase(job.progress, "Compare with the dense model", 2 * self.dense.layers, "layers of both models"):
            dense = proof.run(
                StreamedModel(self.dense.checkpoint, self.dense.architecture, torch.float32, job.device),
                tokens,
                job.progress.advance,
            )
            moe = proof.run(
                StreamedModel(made, family, torch.float32, job.device, experts_on_disk=True),
                tokens,
                job.progress.advance,
            )
        predicts = not self.dense.architecture.is_encoder
        found = proof.compare(dense, moe, tokens, preserves=self.preserves, predicts=predicts)
        error = found.relative_logit_error
        if not error < float("inf") or (self.preserves and error > proof.TOLERANCE):
            raise VerificationError(
                f"The result's logits differ from the dense model's by {error:.2g} of their size, more than "
                f"{proof.TOLERANCE:g}: it does not compute what this model computes. "
                f"{job.output} has no {CONFIG}, so that nothing loads it."
            )
        return found

    def verify(self, output: Path) -> Sizes:
        made = Checkpoint.open(output)
        if not is_opaque(made.config):
            Source.of(made)
        return Sizes(self.source.checkpoint.weight_bytes, made.weight_bytes)


def sample_text() -> str:
    """Return some pages of English prose and code, which come with Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in ("assert", "assignment", "calls", "class", "context-managers"))


def sample_tokens(tokenizer: "Tokenizer | None", vocabulary: int, windows: int, length: int) -> Tensor:
    """Token ids `[windows, length]` of that text; without a tokenizer, every id once in a while."""
    if tokenizer is None:
        ids = (torch.arange(windows * length) * 7919) % vocabulary
    else:
        ids = torch.tensor(tokenizer(sample_text(), add_special_tokens=False, verbose=False)["input_ids"])
    repeats = -(-windows * length // len(ids))
    return ids.repeat(repeats)[: windows * length].view(windows, length)
