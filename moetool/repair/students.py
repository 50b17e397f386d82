"""Models that learn from their original: what of them can change, what that takes, and how the result is written."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moetool.architectures import Architecture
from moetool.architectures.base import whole_number
from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.writer import TensorSpec
from moetool.costs.building_blocks import loading
from moetool.costs.calibration_cost import baseline
from moetool.errors import UsageError
from moetool.format.marker import moetool_entry
from moetool.job.job import Input, Job, Source, pick_device
from moetool.job.plan import usable_bytes
from moetool.job.result import CalibrationFacts, Sizes
from moetool.job.shards import OutputPlan, ShardPlan, by_layer
from moetool.job.stage import refuse_lost
from moetool.job.writing import passed_on, write_checkpoint
from moetool.numerics.work import Work
from moetool.repair.costs import TRAINING_BYTES, TrainedModel
from moetool.repair.options import RepairOptions, Trained
from moetool.repair.sources import MoefiedSource
from moetool.repair.teaching import TaughtByDense, TaughtByMoE, Teaching
from moetool.runtime.building import recomputes

if TYPE_CHECKING:
    from moetool.repair.trainee import Trainee
    from moetool.training.masters import Master
    from moetool.training.weights import ModelWeights

_LOGITS = 5  # copies of a batch's logits while their loss and its gradient are computed


class Student(ABC):
    """A model that is repaired.

    Attributes:
        checkpoint: what it is read from, or as.
        teaching: what it learns, and from which original.
        options: of the repair.
    """

    def __init__(self, checkpoint: Checkpoint, teaching: Teaching, options: RepairOptions) -> None:
        self.checkpoint, self.teaching, self.options = checkpoint, teaching, options

    def training_bytes(self, model: TrainedModel) -> int:
        """Bytes of memory while a model of these sizes is trained, with codes as they are stored."""
        tokens = self.options.batch_size * self.options.sequence_length
        logits = _LOGITS * 4 * tokens * (whole_number(self.checkpoint.settings, "vocab_size") or 0)
        return baseline() + TRAINING_BYTES + model.nbytes + logits + self.teaching.activation_bytes(tokens)

    def fits(self, model: TrainedModel) -> bool:
        """Whether a model of these sizes can be trained in the memory that the options allow."""
        return self.training_bytes(model) <= usable_bytes(self.options)

    @property
    @abstractmethod
    def trains(self) -> Trained:
        """What is trained: with `all` attention and matrices that are stored as numbers, too. `--train` decides, or
        the kind."""

    @property
    @abstractmethod
    def trained(self) -> TrainedModel:
        """What training takes: bytes of the loaded model, and how many numbers of it change."""

    @property
    def streamed(self) -> TrainedModel | None:
        """What training takes where weights that are not trained are read in every pass; `None` if it cannot be so."""
        return None

    @property
    def reading(self) -> Work:
        """The work of reading these once."""
        return loading(self.teaching.size)

    @property
    def told_of_reading(self) -> str:
        """How they are read, in words."""
        return "read layer by layer in every step, since all together take more memory"

    @property
    @abstractmethod
    def input_bytes(self) -> int:
        """Size in bytes of the input's weight files, as they lie on the disk."""

    @property
    @abstractmethod
    def output_bytes(self) -> int:
        """Size in bytes of the repaired model's weight files."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes on the disk that the model takes beside input and result while it is loaded and written."""
        return 0

    @abstractmethod
    def trainee(self, job: Job[Any], *, streams: bool) -> "Trainee":
        """Load the model in fp32, onto the job's device, whole or if it `streams` without its layers. Raises
        `UsageError` where nothing can be trained."""

    @abstractmethod
    def write(self, job: Job[Any], trainee: "Trainee", facts: CalibrationFacts) -> None:
        """Write what was read, with the trained values in their places."""

    def verify(self, output: Path) -> Sizes | None:
        """Open the result as a reader would, and compare sizes; `None` where that is as for any MoE model. Raises
        `VerificationError`."""
        return None


@dataclass(frozen=True)
class Passed:
    """What a repair writes in the layout of its input.

    Attributes:
        plan: of all tensors.
        read: the input's tensor of a name.
        stored: names of those that stay as another tool has stored them.
        config: `config.json`.
    """

    plan: ShardPlan
    read: Callable[[str], Tensor]
    stored: Collection[str]
    config: Mapping[str, object]


class CheckpointStudent(Student):
    """A model in the files of a checkpoint: the result has the names, shapes and dtypes of its tensors."""

    def __init__(self, source: Input, teaching: Teaching, options: RepairOptions) -> None:
        super().__init__(source.checkpoint, teaching, options)
        self._dtype = source.dtype

    @abstractmethod
    def most(self, nbytes: int, share: float) -> TrainedModel:
        """The largest sizes of what can be made of the original, where this is that one itself: `nbytes` of weight
        files, with a `share` of the experts' bytes in numbers of floating point."""

    @abstractmethod
    def passed(self) -> Passed:
        """The layout of the input, which the output has, too."""

    @cached_property
    def streamed(self) -> TrainedModel | None:
        """Layers are read as they are in the files, or decoded by another tool's codes."""
        if self.trains == "all" or not recomputes(self.checkpoint):
            return None
        changes = self.trains == "lora" or (self.trains == "small" and bool(self.checkpoint.forms))
        return TrainedModel.streamed(self.checkpoint, self.trained.trained, changes=changes)

    @property
    def input_bytes(self) -> int:
        return self.checkpoint.weight_bytes

    @property
    def output_bytes(self) -> int:
        return self.passed().plan.nbytes

    @property
    @abstractmethod
    def architecture(self) -> Architecture | DenseArchitecture:
        """What is known of the family."""

    def _weights(self, job: Job[Any], *, streams: bool) -> "ModelWeights":
        from moetool.training.weights import open_weights

        return open_weights(self.checkpoint, self.architecture, self._layer_paths, job.device, streams=streams)

    @property
    def _layer_paths(self) -> list[str]:
        return [self.architecture.layer_path(layer) for layer in range(self.architecture.layers)]

    def _masters(self, weights: "ModelWeights") -> "dict[str, Master]":
        from moetool.repair.training import choose, low_rank
        from moetool.training.masters import copies

        found = copies(weights.keep(choose(weights.model, self.trains)), self._dtype)
        if self.trains == "lora":
            found |= low_rank(weights, found, self._dtype, self.options.seed)
        return found

    def trainee(self, job: Job[Any], *, streams: bool) -> "Trainee":
        from moetool.repair.trainee import Trainee

        weights = self._weights(job, streams=streams)
        if not (masters := self._masters(weights)):
            raise UsageError("This model has no norms, routers, scales or factors that could be trained.")
        return Trainee(weights, masters)

    def write(self, job: Job[Any], trainee: "Trainee", facts: CalibrationFacts) -> None:
        from moetool.repair.stored_scales import rescaled, stored_scales

        passed = self.passed()
        scales = stored_scales(self.checkpoint, passed.stored) if self.trains == "small" else {}

        def tensors(layer: int) -> Iterator[tuple[str, Tensor]]:
            specs = passed.plan.unit(layer)
            made = trainee.on_disk(trainee.trained(self.architecture.layer_of(specs[0].name)))
            for spec in specs:
                own, new = passed.read(spec.name), made.get(spec.name)
                if spec.name in scales and (coded := made.get(scales[spec.name][0])) is not None:
                    name, found = scales[spec.name]
                    yield spec.name, rescaled(found, own, self.checkpoint.read(name), coded)
                elif spec.name in passed.stored or new is None or not own.is_floating_point() or new.shape != own.shape:
                    yield spec.name, own
                else:
                    yield spec.name, new.to(own.dtype)

        write_checkpoint(
            job,
            passed.plan,
            tensors,
            config=passed.config,
            provenance=passed_on(self.checkpoint),
            calibration=facts,
        )


class MoEStudent(CheckpointStudent):
    """A compressed MoE model."""

    def __init__(self, source: Source, original: Checkpoint, options: RepairOptions) -> None:
        super().__init__(source, TaughtByMoE(source, original, options), options)
        self.source = source

    @cached_property
    def trains(self) -> Trained:
        """By default all that there is memory for where experts are stored in full, unless in another tool's format,
        which would not stay in it."""
        reader, wanted = self.source.experts, self.options.train
        if wanted != "auto":
            return wanted
        is_stored = self.source.checkpoint.stored_entry is not None
        if is_stored or not any(reader.layout(layer).is_native for layer in reader.moe_layers):
            return "small"
        return "all" if self.fits(TrainedModel.of(self.source, "all")) else "lora"

    @property
    def architecture(self) -> Architecture:
        return self.source.architecture

    @cached_property
    def streamed(self) -> TrainedModel | None:
        """moetool's own codes stay in the files, which are mapped on a processor."""
        if not self._has_own_forms:
            return super().streamed
        if pick_device(self.options.device).type != "cpu":
            return None
        return replace(self.trained, loaded=self.trained.loaded - self._coded_bytes)

    @property
    def reading(self) -> Work:
        return Work(read=self._coded_bytes) if self._has_own_forms else super().reading

    @property
    def told_of_reading(self) -> str:
        if not self._has_own_forms:
            return super().told_of_reading
        return "codes in the files, read and decoded in every step, since in memory they take more"

    @property
    def _has_own_forms(self) -> bool:
        """Whether experts, or what is beside them, are in moetool's own forms."""
        return moetool_entry(self.checkpoint.config) is not None

    @property
    def _coded_bytes(self) -> int:
        infos = self.checkpoint.tensors.values()
        return sum(info.nbytes for info in infos if not info.dtype.is_floating_point)

    def _weights(self, job: Job[Any], *, streams: bool) -> "ModelWeights":
        from moetool.training.weights import open_held

        if not streams or not self._has_own_forms:
            return super()._weights(job, streams=streams)
        return open_held(self.checkpoint, self._layer_paths, job.device, paged=True)

    def _masters(self, weights: "ModelWeights") -> "dict[str, Master]":
        from moetool.repair.stored_scales import group_factors

        found = super()._masters(weights)
        if self.trains == "small" and self.checkpoint.forms:
            found |= group_factors(self.source, weights.model)
        return found

    @cached_property
    def trained(self) -> TrainedModel:
        return TrainedModel.of(self.source, self.trains)

    def most(self, nbytes: int, share: float) -> TrainedModel:
        if share < 1:
            return TrainedModel.most(self.source, nbytes, share, "small")
        every = TrainedModel.most(self.source, nbytes, share, "all")
        return every if self.fits(every) else TrainedModel.most(self.source, nbytes, share, "lora")

    def passed(self) -> Passed:
        plan = OutputPlan(
            replace(self.source, keeps_stored=self.trains not in ("lora", "all")), {}, self.options.shard_size
        )
        return Passed(plan, plan.read, plan.stored, plan.config(self.source.checkpoint.config))


class MoefiedStudent(CheckpointStudent):
    """A moefied model. It selects the experts of a token as it was made to, which gets no gradient."""

    def __init__(self, source: MoefiedSource, original: Checkpoint, options: RepairOptions) -> None:
        super().__init__(source, TaughtByDense(source.checkpoint, original, options), options)
        self.source = source

    @cached_property
    def architecture(self) -> DenseArchitecture:
        return find_dense_architecture(self.source.checkpoint.config)

    @cached_property
    def trains(self) -> Trained:
        """By default all that there is memory for: neurons that are always skipped cost what those that are left can
        learn to do."""
        wanted = self.options.train
        if wanted == "routers":
            raise UsageError("--train routers: a moefied model has no routers. Use --train small or --train all.")
        if wanted != "auto":
            return wanted
        return "all" if self.fits(TrainedModel.of_moefied(self.checkpoint, "all")) else "lora"

    @cached_property
    def trained(self) -> TrainedModel:
        return TrainedModel.of_moefied(self.source.checkpoint, self.trains)

    def most(self, nbytes: int, share: float) -> TrainedModel:
        """A moefied model has the matrices of the dense one, and what selects neurons beside them."""
        return replace(self.trained, loaded=nbytes * torch.float32.itemsize // self.source.dtype.itemsize)

    def passed(self) -> Passed:
        checkpoint = self.source.checkpoint
        specs = [TensorSpec(name, info.dtype, info.shape) for name, info in sorted(checkpoint.tensors.items())]
        plan = by_layer(specs, self.options.shard_size)
        return Passed(plan, checkpoint.read, (), checkpoint.config)

    def verify(self, output: Path) -> Sizes:
        before, after = self.source.checkpoint, MoefiedSource.of(Checkpoint.open(output)).checkpoint
        refuse_lost(before.tensors.keys() - after.tensors.keys())
        return Sizes(before.weight_bytes, after.weight_bytes)
