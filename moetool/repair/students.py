"""Models that learn from their original: what of them can change, what that takes, and how the result is written."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moetool.architectures.dense import is_encoder
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.writer import TensorSpec
from moetool.costs.building_blocks import ModelSize, dense_size, moe_size
from moetool.errors import InvalidInputError, UsageError
from moetool.format.kinds import custom_module
from moetool.format.kinds.moefied import MoefiedSpec
from moetool.job.blueprint import layer_of
from moetool.job.job import Input, Source
from moetool.job.shards import OutputPlan, ShardPlan
from moetool.repair.costs import StreamedOriginal, TrainedModel, activation_bytes
from moetool.repair.options import ROUTING, ROUTING_OF_FEWER, RepairOptions, Trained
from moetool.repair.routing import RoutingTarget, routing_target
from moetool.runtime.building import check_sizes, recomputes
from moetool.runtime.dense import DenseModel


@dataclass(frozen=True)
class MoefiedSource:
    """A moefied model as the input of a repair."""

    checkpoint: Checkpoint

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "MoefiedSource":
        """Open one by its headers. Raises `InvalidInputError` for an encoder, for a model that skips nothing, and for
        tensors of other shapes than the config has."""
        spec = custom_module(checkpoint.config)
        assert isinstance(spec, MoefiedSpec)
        _refuse_encoder(checkpoint)
        if spec.at_work == spec.experts:
            raise InvalidInputError(
                f"{checkpoint.source} computes all {spec.experts} experts (keep {spec.keep:g}), so that nothing is to "
                "be learnt back. Moefy with a smaller --keep."
            )
        if not checkpoint.is_imagined:
            check_sizes(checkpoint)
        return cls(checkpoint)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which most bytes of the weight files are stored."""
        return self.checkpoint.main_dtype


RepairedSource = Source | MoefiedSource


def repaired_source(checkpoint: Checkpoint) -> RepairedSource:
    """Open the input of a repair: an MoE model, or a moefied one. Raises `InvalidInputError` for any other."""
    if isinstance(custom_module(checkpoint.config), MoefiedSpec):
        return MoefiedSource.of(checkpoint)
    return Source.of(checkpoint)


def source_before(source: Input) -> RepairedSource:
    """What a repair is planned on, beside its own original, before anything is made of a model: the model itself.
    Raises `InvalidInputError` for an encoder."""
    if isinstance(source, Source):
        return source
    _refuse_encoder(source.checkpoint)
    return MoefiedSource(source.checkpoint)


def _refuse_encoder(checkpoint: Checkpoint) -> None:
    if is_encoder(checkpoint.config):
        raise InvalidInputError(
            f"{checkpoint.source} is an encoder ({checkpoint.config['model_type']}): repair compares predictions of "
            "the next token."
        )


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


class Student(ABC):
    """A model that is repaired, beside its `original`.

    Attributes:
        original: the model that it was made of.
        options: of the repair.
    """

    def __init__(self, original: Checkpoint, options: RepairOptions) -> None:
        self.original, self.options = original, options

    @property
    @abstractmethod
    def size(self) -> ModelSize:
        """Sizes of the original, which tell what a pass through it, or through the model, takes."""

    @abstractmethod
    def teacher(self, windows: int, beside: int) -> StreamedOriginal:
        """The original before so many windows, with so many bytes in memory `beside` one of its layers."""

    @property
    @abstractmethod
    def trains(self) -> Trained:
        """What is trained: with `all` attention and matrices that are stored as numbers, too. `--train` decides, or
        the kind."""

    @property
    @abstractmethod
    def routing(self) -> float:
        """Weight of the routers' divergence, if there are routers."""

    @property
    @abstractmethod
    def target(self) -> RoutingTarget | None:
        """The original's routing as a target; `None` where it is none."""

    @property
    def routed(self) -> int:
        """Experts of all layers whose routing is noted for every token."""
        return 0

    @property
    @abstractmethod
    def trained(self) -> TrainedModel:
        """Sizes of what is trained."""

    @abstractmethod
    def most(self, nbytes: int, share: float) -> TrainedModel:
        """The largest sizes of what can be made of the original, where this is that one itself: `nbytes` of weight
        files, with a `share` of the experts' bytes in numbers of floating point."""

    @abstractmethod
    def activation_bytes(self, tokens: int) -> int:
        """Bytes of what is kept of a batch of so many tokens on its way through all layers and back."""

    @abstractmethod
    def passed(self) -> Passed:
        """The layout of the input, which the output has, too."""


class MoEStudent(Student):
    """A compressed MoE model."""

    def __init__(self, source: Source, original: Checkpoint, options: RepairOptions) -> None:
        super().__init__(original, options)
        self.source = source

    @cached_property
    def _original(self) -> Source:
        return Source.of(self.original)

    @cached_property
    def size(self) -> ModelSize:
        return moe_size(self._original.experts)

    def teacher(self, windows: int, beside: int) -> StreamedOriginal:
        return StreamedOriginal.of_experts(self._original, windows, beside, self.options)

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

    @cached_property
    def routing(self) -> float:
        """Experts that are left do the work of those that are gone, too: where the original would send a token tells
        less of them."""
        if self.options.routing is not None:
            return self.options.routing
        is_whole = self.source.architecture.routed_to == self._original.architecture.routed_to
        return ROUTING if is_whole else ROUTING_OF_FEWER

    @cached_property
    def target(self) -> RoutingTarget | None:
        return routing_target(self.source, self._original) if self.routing else None

    @property
    def routed(self) -> int:
        architecture = self.source.architecture
        return len(architecture.moe_layers) * architecture.routed_to[0] * (self.target is not None)

    @property
    def trained(self) -> TrainedModel:
        return TrainedModel.of(self.source, self.trains)

    def most(self, nbytes: int, share: float) -> TrainedModel:
        return TrainedModel.most(self.source, nbytes, share)

    def activation_bytes(self, tokens: int) -> int:
        architecture = self.source.architecture
        return activation_bytes(architecture.hidden, architecture.layers, tokens)

    def passed(self) -> Passed:
        plan = OutputPlan(replace(self.source, keeps_stored=self.trains != "all"), {}, self.options.shard_size)
        return Passed(plan, plan.read, plan.stored, plan.config(self.source.checkpoint.config))


class MoefiedStudent(Student):
    """A moefied model. It selects the experts of a token as it was made to: that gets no gradient, and no router says
    where the original, which has none, would send a token."""

    routing, target = 0.0, None

    def __init__(self, source: MoefiedSource, original: Checkpoint, options: RepairOptions) -> None:
        super().__init__(original, options)
        self.source = source

    @cached_property
    def _dense(self) -> DenseModel:
        if custom_module(self.original.config) is not None:
            raise InvalidInputError(f"--to {self.original.source} is no dense model, which this one was made of.")
        return DenseModel(self.original)

    @cached_property
    def size(self) -> ModelSize:
        return dense_size(self._dense)

    def teacher(self, windows: int, beside: int) -> StreamedOriginal:
        return StreamedOriginal.of_dense(self._dense, windows, beside, self.options)

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

    def activation_bytes(self, tokens: int) -> int:
        again = recomputes(self.source.checkpoint)
        return activation_bytes(self._dense.hidden, self._dense.layers, tokens, again=again)

    def passed(self) -> Passed:
        checkpoint, units = self.source.checkpoint, dict[str, list[TensorSpec]]()
        for name, info in sorted(checkpoint.tensors.items()):
            units.setdefault(layer_of(name), []).append(TensorSpec(name, info.dtype, info.shape))
        plan = ShardPlan(enumerate(units.values()), self.options.shard_size)
        return Passed(plan, checkpoint.read, (), checkpoint.config)


def student_of(source: RepairedSource, original: Checkpoint, options: RepairOptions) -> Student:
    """The model of a source, beside its original."""
    if isinstance(source, MoefiedSource):
        return MoefiedStudent(source, original, options)
    return MoEStudent(source, original, options)
