"""Models that learn from their original: what of them can change, what that takes, and how the result is written."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import described_in
from moetool.checkpoint.writer import TensorSpec
from moetool.errors import UsageError
from moetool.job.job import Input, Job, Source
from moetool.job.result import CalibrationFacts, Sizes
from moetool.job.shards import OutputPlan, ShardPlan, by_layer
from moetool.job.stage import refuse_lost
from moetool.job.writing import passed_on, write_checkpoint
from moetool.repair.costs import TrainedModel
from moetool.repair.options import RepairOptions, Trained
from moetool.repair.sources import MoefiedSource
from moetool.repair.teaching import TaughtByDense, TaughtByMoE, Teaching

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moetool.repair.masters import Master


class Student(ABC):
    """A model that is repaired.

    Attributes:
        teaching: what it learns, and from which original.
        options: of the repair.
    """

    def __init__(self, teaching: Teaching, options: RepairOptions) -> None:
        self.teaching, self.options = teaching, options

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
    def load(self, job: Job[Any]) -> "PreTrainedModel":
        """Load the whole model in fp32, onto the job's device."""

    @abstractmethod
    def masters(self, model: "PreTrainedModel") -> "dict[str, Master]":
        """What steps are taken on, by name of the parameters. Raises `UsageError` where nothing can be trained."""

    @abstractmethod
    def write(self, job: Job[Any], model: "PreTrainedModel", facts: CalibrationFacts) -> None:
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
        super().__init__(teaching, options)
        self._checkpoint, self._dtype = source.checkpoint, source.dtype

    @abstractmethod
    def most(self, nbytes: int, share: float) -> TrainedModel:
        """The largest sizes of what can be made of the original, where this is that one itself: `nbytes` of weight
        files, with a `share` of the experts' bytes in numbers of floating point."""

    @abstractmethod
    def passed(self) -> Passed:
        """The layout of the input, which the output has, too."""

    @property
    def input_bytes(self) -> int:
        return self._checkpoint.weight_bytes

    @property
    def output_bytes(self) -> int:
        return self.passed().plan.nbytes

    def load(self, job: Job[Any]) -> "PreTrainedModel":
        from moetool.runtime.loading import load_model

        with described_in(self._checkpoint.path):
            return load_model(self._checkpoint, torch.float32, job.device)

    def masters(self, model: "PreTrainedModel") -> "dict[str, Master]":
        from moetool.repair.masters import copies
        from moetool.repair.training import choose

        if not (chosen := choose(model, self.trains)):
            raise UsageError("This model has no norms, routers, scales or factors that could be trained.")
        return copies(chosen, self._dtype)

    def write(self, job: Job[Any], model: "PreTrainedModel", facts: CalibrationFacts) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        from moetool.repair.stored_scales import rescaled, stored_scales

        passed = self.passed()
        made: dict[str, Tensor] = dict(revert_weight_conversion(model, model.to("cpu").state_dict()))
        scales = stored_scales(self._checkpoint, passed.stored) if self.trains == "small" else {}

        def tensors(layer: int) -> Iterator[tuple[str, Tensor]]:
            for spec in passed.plan.unit(layer):
                own, new = passed.read(spec.name), made.get(spec.name)
                if spec.name in scales and (coded := made.get(scales[spec.name][0])) is not None:
                    name, found = scales[spec.name]
                    yield spec.name, rescaled(found, own, self._checkpoint.read(name), coded.detach())
                elif spec.name in passed.stored or new is None or not own.is_floating_point() or new.shape != own.shape:
                    yield spec.name, own
                else:
                    yield spec.name, new.detach().to(own.dtype)

        write_checkpoint(
            job,
            passed.plan,
            tensors,
            config=passed.config,
            provenance=passed_on(self._checkpoint),
            calibration=facts,
        )


class MoEStudent(CheckpointStudent):
    """A compressed MoE model."""

    def __init__(self, source: Source, original: Checkpoint, options: RepairOptions) -> None:
        super().__init__(source, TaughtByMoE(source, original, options), options)
        self.source = source

    @cached_property
    def trains(self) -> Trained:
        """By default all where experts are stored in full, unless in another tool's format, which would not stay in
        it."""
        reader, wanted = self.source.experts, self.options.train
        if wanted != "auto":
            return wanted
        is_stored = self.source.checkpoint.stored_entry is not None
        is_full = not is_stored and any(reader.layout(layer).is_native for layer in reader.moe_layers)
        return "all" if is_full else "small"

    def masters(self, model: "PreTrainedModel") -> "dict[str, Master]":
        from moetool.repair.stored_scales import group_factors

        found = super().masters(model)  # first, since it lets nothing else have gradients
        if self.trains == "small" and self._checkpoint.forms:
            found |= group_factors(self.source, model)
        return found

    @property
    def trained(self) -> TrainedModel:
        return TrainedModel.of(self.source, self.trains)

    def most(self, nbytes: int, share: float) -> TrainedModel:
        return TrainedModel.most(self.source, nbytes, share)

    def passed(self) -> Passed:
        plan = OutputPlan(replace(self.source, keeps_stored=self.trains != "all"), {}, self.options.shard_size)
        return Passed(plan, plan.read, plan.stored, plan.config(self.source.checkpoint.config))


class MoefiedStudent(CheckpointStudent):
    """A moefied model. It selects the experts of a token as it was made to, which gets no gradient."""

    def __init__(self, source: MoefiedSource, original: Checkpoint, options: RepairOptions) -> None:
        super().__init__(source, TaughtByDense(source.checkpoint, original, options), options)
        self.source = source

    @property
    def trains(self) -> Trained:
        """All by default: neurons that are always skipped cost what those that are left can learn to do."""
        if self.options.train == "routers":
            raise UsageError("--train routers: a moefied model has no routers. Use --train small or --train all.")
        return "small" if self.options.train == "small" else "all"

    @property
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
