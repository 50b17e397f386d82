"""What a model learns from its original: predictions, and routing where both have routers."""

from abc import ABC, abstractmethod
from functools import cached_property

from moetool.checkpoint.reader import Checkpoint
from moetool.costs.building_blocks import ModelSize, dense_size, moe_size
from moetool.errors import InvalidInputError
from moetool.format.kinds import custom_module
from moetool.job.job import Source
from moetool.repair.costs import StreamedOriginal, activation_bytes
from moetool.repair.options import ROUTING, ROUTING_OF_FEWER, RepairOptions
from moetool.repair.routing import RoutingTarget, routing_target
from moetool.runtime.building import recomputes
from moetool.runtime.dense import DenseModel


class Teaching(ABC):
    """Tells what a model learns from its original: which predictions and routing, and what these take to note."""

    @property
    @abstractmethod
    def size(self) -> ModelSize:
        """Sizes of the original, which tell what a pass through it, or through the model, takes."""

    @abstractmethod
    def teacher(self, windows: int, beside: int) -> StreamedOriginal:
        """The original before so many windows, with so many bytes in memory `beside` one of its layers."""

    @property
    @abstractmethod
    def has_routers(self) -> bool:
        """Whether there are routers, which can learn where the original sends a token."""

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

    @abstractmethod
    def activation_bytes(self, tokens: int) -> int:
        """Bytes of what is kept of a batch of so many tokens on its way through all layers and back."""


class TaughtByMoE(Teaching):
    """Teaches predictions and routing: model and original are MoE models."""

    has_routers = True

    def __init__(self, source: Source, original: Checkpoint, options: RepairOptions) -> None:
        self._source, self._checkpoint, self._options = source, original, options

    @cached_property
    def _original(self) -> Source:
        return Source.of(self._checkpoint)

    @cached_property
    def size(self) -> ModelSize:
        return moe_size(self._original.experts)

    def teacher(self, windows: int, beside: int) -> StreamedOriginal:
        return StreamedOriginal.of_experts(self._original, windows, beside, self._options)

    @cached_property
    def routing(self) -> float:
        """Experts that are left do the work of those that are gone, too: where the original would send a token tells
        less of them."""
        if self._options.routing is not None:
            return self._options.routing
        is_whole = self._source.architecture.routed_to == self._original.architecture.routed_to
        return ROUTING if is_whole else ROUTING_OF_FEWER

    @cached_property
    def target(self) -> RoutingTarget | None:
        return routing_target(self._source, self._original) if self.routing else None

    @property
    def routed(self) -> int:
        architecture = self._source.architecture
        return len(architecture.moe_layers) * architecture.routed_to[0] * (self.target is not None)

    def activation_bytes(self, tokens: int) -> int:
        architecture = self._source.architecture
        return activation_bytes(architecture.hidden, architecture.layers, tokens)


class TaughtByDense(Teaching):
    """Teaches predictions alone: the original is dense, and has no routers."""

    has_routers, routing, target = False, 0.0, None

    def __init__(self, checkpoint: Checkpoint, original: Checkpoint, options: RepairOptions) -> None:
        self._checkpoint, self._original, self._options = checkpoint, original, options

    @cached_property
    def _dense(self) -> DenseModel:
        if custom_module(self._original.config) is not None:
            raise InvalidInputError(f"--to {self._original.source} is no dense model, which this one was made of.")
        return DenseModel(self._original)

    @cached_property
    def size(self) -> ModelSize:
        return dense_size(self._dense)

    def teacher(self, windows: int, beside: int) -> StreamedOriginal:
        return StreamedOriginal.of_dense(self._dense, windows, beside, self._options)

    def activation_bytes(self, tokens: int) -> int:
        return activation_bytes(self._dense.hidden, self._dense.layers, tokens, again=self._runs_again)

    @cached_property
    def _runs_again(self) -> bool:
        return recomputes(self._checkpoint)
