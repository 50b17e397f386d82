"""Upcycling of several fine-tuned dense models into one MoE model (Branch-Train-MiX, arXiv:2403.07816)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import AliasChoices, BeforeValidator, Field, field_validator
from safetensors.torch import load_file
from torch import Tensor

from moetool.calibration.windows import check_vocabulary, load_tokenizer, sample_windows
from moetool.checkpoint.files import save_tensors
from moetool.checkpoint.manifest import ExpertOrigin, Provenance
from moetool.checkpoint.reader import Checkpoint
from moetool.convert.results import ConversionResult
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.phases import ROUTERS, Phases, router_phase
from moetool.errors import InvalidInputError, UsageError
from moetool.job.blueprint import open_for_planning
from moetool.job.job import DenseSource, Job
from moetool.job.options import Listed, Options, RunOptions
from moetool.job.plan import Plan
from moetool.job.progress import phase
from moetool.job.stage import found_here
from moetool.runtime.dense import DenseModel
from moetool.upcycle.experts import Copies
from moetool.upcycle.lora_sources import adapter_fingerprint, merge_adapter, open_adapter
from moetool.upcycle.router import centroid_router
from moetool.upcycle.routing import StartingRows
from moetool.upcycle.stage import Start, Upcycle, UpcycleOptions

# What models that are mixed have to agree on beyond the shapes of their tensors, or else one of them computes wrongly.
_COMMON = ("model_type", "num_attention_heads", "num_key_value_heads", "rope_parameters", "rms_norm_eps", "hidden_act",
           "sliding_window", "tie_word_embeddings")  # fmt: skip


class ExpertSource(Options):
    """A model whose FFNs become experts, and what its router rows are to answer to."""

    model: str = Field(
        validation_alias=AliasChoices("model", "source_model"), description="A checkpoint, or a LoRA adapter of INPUT."
    )
    prompts: tuple[str, ...] = Field(
        (), validation_alias=AliasChoices("prompts", "positive_prompts"), description="Text that it should get."
    )
    negative_prompts: tuple[str, ...] = Field((), description="Text that it should not get.")
    data: Listed | None = Field(None, description="Text that it should get, as for --calibration.")


def _source_named(given: object) -> object:
    return {"model": given} if isinstance(given, str) else given


class BranchTrainMixOptions(UpcycleOptions):
    """Options of Branch-Train-MiX: source models, origin of all other weights, first values of routers."""

    experts: int | None = Field(
        None, ge=2, le=10_000, description="Routed experts per layer [default: one per source]."
    )
    source: tuple[Annotated[ExpertSource, BeforeValidator(_source_named)], ...] = Field(
        (),
        validation_alias=AliasChoices("source", "sources"),
        description="A model whose FFNs become an expert; several times. Checkpoints, or LoRA adapters of INPUT.",
    )
    rest: str = Field(
        "average", description="Attention, norms and embeddings: average (of the sources), input, or a checkpoint."
    )

    @field_validator("experts", mode="before")
    @classmethod
    def _is_number(cls, given: object) -> object:
        if isinstance(given, list):
            raise ValueError("it is a number here; what mergekit lists under `experts` goes under `sources`")
        return given

    gate_mode: Literal["random", "prompts", "data"] = Field(
        "random", description="Routers: random, or from each source's prompts or data (see presets)."
    )


class BranchTrainMix(Upcycle[BranchTrainMixOptions]):
    """Experts from models that were fine-tuned apart from one another."""

    name: ClassVar[str] = "branch-train-mix"
    summary: ClassVar[str] = "experts from several fine-tuned models, the rest averaged"
    options_type: ClassVar[type[RunOptions]] = BranchTrainMixOptions

    @cached_property
    def specs(self) -> list[ExpertSource]:
        """The sources, each with what there is to say of it. Raises `UsageError` for too few."""
        found = list(self.options.source)
        if len(found) < 2:
            raise UsageError("--method branch-train-mix needs at least two models: --source A --source B.")
        mode = self.options.gate_mode
        if mode != "random":
            lacking = [entry.model for entry in found if not (entry.prompts if mode == "prompts" else entry.data)]
            if lacking:
                raise UsageError(
                    f"--gate-mode {mode}: the source {lacking[0]} has no {mode}. Give them by --preset FILE.yaml."
                )
        return found

    @cached_property
    def _adapters(self) -> dict[int, Path]:
        opened = {index: open_adapter(spec.model) for index, spec in enumerate(self.specs)}
        return {index: path for index, path in opened.items() if path is not None}

    @cached_property
    def sources_opened(self) -> list[DenseModel]:
        """The models, checked against INPUT. Adapters stand for INPUT until they are merged."""
        models = []
        for index, spec in enumerate(self.specs):
            checkpoint = self.source.checkpoint if index in self._adapters else self._open(spec.model)
            models.append(self._fitting(spec.model, checkpoint))
        return models

    def _open(self, name: str) -> Checkpoint:
        return open_for_planning(name) if self.source.checkpoint.is_imagined else Checkpoint.open(name)

    def _fitting(self, name: str, checkpoint: Checkpoint) -> DenseModel:
        """A model with the very tensors of INPUT. Raises `InvalidInputError` with the first that differs."""
        own, other = self.source.checkpoint, checkpoint
        if surplus := sorted(name for name in set(other.tensors) - set(own.tensors) if not self.dense.may_lack(name)):
            raise InvalidInputError(
                f"{name} has a tensor {surplus[0]}, which {own.source} has not: they cannot be mixed."
            )
        for tensor, info in own.tensors.items():
            if tensor not in other.tensors and self.dense.may_lack(tensor):
                continue
            if tensor not in other.tensors:
                raise InvalidInputError(f"{name} has no tensor {tensor}, which {own.source} has: they cannot be mixed.")
            if (found := other.tensors[tensor].shape) != info.shape:
                by_token = "embed" in tensor or "lm_head" in tensor
                kind = "vocabularies" if by_token and found[0] != info.shape[0] else "shapes"
                raise InvalidInputError(
                    f"Sources of different {kind} cannot be mixed: {tensor} has shape {list(found)} in {name} and "
                    f"{list(info.shape)} in {own.source}."
                )
        model = DenseModel(other)
        for key in _COMMON:
            mine, theirs = getattr(self.dense.config, key, None), getattr(model.config, key, None)
            if mine != theirs:
                raise InvalidInputError(
                    f"{name} has {key} {theirs!r} and {own.source} has {mine!r}: as parts of one model, one of them "
                    "would compute something else. Take sources of one kind, or write another INPUT's config."
                )
        return model

    @property
    def copies(self) -> int:
        return self.options.experts or len(self.specs)

    @cached_property
    def start(self) -> Start:
        return Start(Copies(self.sources_opened), preserves=False)

    @property
    def rest(self) -> Sequence[DenseModel]:
        choice = self.options.rest
        if choice == "average":
            return self.sources_opened
        return [self.dense] if choice == "input" else [self._donor]

    @cached_property
    def _donor(self) -> DenseModel:
        return self._fitting(self.options.rest, self._open(self.options.rest))

    def inputs(self) -> Mapping[str, Checkpoint]:
        models = {f"source/{index}": model for index, model in enumerate(self.sources_opened)}
        if self.options.rest not in ("average", "input"):
            models["rest"] = self._donor
        found = {name: model.checkpoint for name, model in models.items()}
        return {**super().inputs(), **found}

    def sources(self) -> Mapping[str, str]:
        adapters = {f"source/{index}": adapter_fingerprint(path) for index, path in self._adapters.items()}
        return {**super().sources(), **adapters}

    def provenance(self) -> Provenance:
        """Record of the upcycling, and of the source that each expert came from."""
        fingerprints = [
            adapter_fingerprint(self._adapters[index]) if index in self._adapters else model.checkpoint.fingerprint()
            for index, model in enumerate(self.sources_opened)
        ]
        every = zip(self.specs, fingerprints, strict=True)
        sources = [ExpertOrigin(model=spec.model, fingerprint=found) for spec, found in every]
        experts = tuple(sources[expert % len(sources)] for expert in range(self.copies))
        return super().provenance().model_copy(update={"experts": experts})

    def texts(self) -> list[str]:
        own = [spec.data for spec in self.specs if spec.data] if self.options.gate_mode == "data" else []
        return [*super().texts(), *own]

    def reads(self) -> list[Path]:
        return [*super().reads(), *found_here([*(spec.model for spec in self.specs), self.options.rest])]

    def plan(self) -> Plan:
        if len(self.specs) > self.copies:
            raise UsageError(f"--experts {self.copies}: there are {len(self.specs)} sources. Leave some out.")
        plan = super().plan()
        more = [model.checkpoint.weight_bytes for model in self.sources_opened]
        return replace(plan, input_bytes=plan.input_bytes + sum(more))

    @property
    def measures(self) -> bool:
        return super().measures if self.options.gate_mode == "random" else bool(self.options.center_router)

    def measuring(self) -> Phases:
        options, texts = self.options, len(self.specs)
        if options.gate_mode == "random":
            return super().measuring()
        cost = CalibrationCost(texts * options.samples, options.sequence_length, 4)
        return (router_phase(cost, self.dense, ROUTERS),)

    @property
    def _merged_bytes(self) -> int:
        """Bytes of the base with one adapter merged into it, decoded where its files hold it in fewer bits."""
        return self.source.checkpoint.weight_bytes + self.source.checkpoint.growth()

    def _scratch_bytes(self) -> int:
        return super()._scratch_bytes() + len(self._adapters) * self._merged_bytes

    def _memory_bytes(self) -> int:
        options, merging = self.options, self._merged_bytes if self._adapters else 0
        tokens = options.samples * options.sequence_length * len(self.specs) if options.gate_mode == "data" else 0
        return super()._memory_bytes() + merging + 4 * tokens * self.dense.hidden

    def run(self, job: Job[DenseSource]) -> ConversionResult:
        for index in job.share("merge", dict.fromkeys(self._adapters, 1.0)):
            adapter, merged = self._adapters[index], self._merged(job, index)
            job.progress.log(f"Merging the adapter {adapter} into {self.source.checkpoint.source}.")
            merge_adapter(adapter, self.source.checkpoint, merged)
            job.finish(f"merge/{index}", made=[path for path in merged.rglob("*") if path.is_file()])
        for index, adapter in self._adapters.items():
            self.sources_opened[index] = self._fitting(str(adapter), Checkpoint.open(self._merged(job, index)))
        return super().run(job)

    def _merged(self, job: Job[DenseSource], index: int) -> Path:
        return job.work / f"merged-{index}"

    # Routers.

    def rows(self, job: Job[DenseSource]) -> StartingRows:
        if self.options.gate_mode == "random":
            return super().rows(job)
        if job.unit("routers"):
            with phase(job.progress, "Routers", self.dense.layers, "layers"):
                rows = {str(layer): rows for layer, rows in self._measured_rows(job)}
            save_tensors(job.work / "routers.safetensors", rows)
            job.finish("routers")
        job.meet()
        saved = load_file(job.work / "routers.safetensors")
        return StartingRows(lambda layer: saved[str(layer)])

    def _measured_rows(self, job: Job[DenseSource]) -> Iterator[tuple[int, Tensor]]:
        """The router of every layer from the inputs that INPUT's own FFNs have on each source's text."""
        from moetool.calibration.streaming import StreamedModel
        from moetool.convert.inputs import prompt_moments

        model = StreamedModel(self.source.checkpoint, self.dense.architecture, job.compute_dtype, job.device)
        groups = self._texts()
        count, ffn = len(self.specs), self.dense.architecture.ffn
        for layer, moments in enumerate(prompt_moments(model, groups, ffn, job.progress.advance)):
            if layer not in self.spec.layers:
                continue
            means = moments.means
            centroids = means[:count] - torch.where(moments.count[count:, None] > 0, means[count:] - moments.mean, 0)
            rows = centroid_router(centroids, moments.mean, moments.covariance)
            yield layer, self._spread_over_copies(rows, layer)

    def _spread_over_copies(self, rows: Tensor, layer: int) -> Tensor:
        """Rows `[sources, hidden]` for every expert; where a source has several, with a little noise between them."""
        index = torch.arange(self.copies) % len(rows)
        noise = 0.1 * self.fresh()(layer) if self.copies > len(rows) else 0
        return rows[index] + noise

    def _texts(self) -> list[list[Tensor]]:
        """Token ids by source, then (maybe none) those that it should not get."""
        tokenizer = load_tokenizer(self.source.checkpoint.path)
        options, context = self.options, int(getattr(self.dense.config, "max_position_embeddings", 2048))

        def encoded(prompts: Sequence[str]) -> list[Tensor]:
            ids = [torch.tensor(tokenizer(prompt)["input_ids"][:context], dtype=torch.long) for prompt in prompts]
            if any(not len(row) for row in ids):
                raise InvalidInputError("A prompt is empty.")
            return ids

        wanted, unwanted = [], []
        for spec in self.specs:
            if options.gate_mode == "data":
                assert spec.data is not None
                windows = sample_windows(
                    spec.data,
                    tokenizer,
                    samples=options.samples,
                    sequence_length=options.sequence_length,
                    seed=options.seed,
                    bos=options.bos,
                )
                wanted.append(list(windows))
            else:
                wanted.append(encoded(spec.prompts))
            unwanted.append(encoded(spec.negative_prompts))
        for row in (row for group in [*wanted, *unwanted] for row in group):
            check_vocabulary(row, int(self.dense.config.vocab_size))
        return [*wanted, *unwanted]
