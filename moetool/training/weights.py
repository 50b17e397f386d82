"""Weights of a model in training: all in memory, or those of a decoder layer only while it runs."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moetool.architectures import Architecture
from moetool.architectures.dense import DenseArchitecture
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import described_in
from moetool.runtime.attention import attend_by_kernels
from moetool.runtime.conversions import conversions_of
from moetool.runtime.loading import load_model
from moetool.runtime.modules.insertion import paths_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moetool.calibration.streaming import StreamedModel


class ModelWeights(ABC):
    """A model and its decoder layers.

    Attributes:
        model: what of it is trained is in memory, and what is outside of the layers.
        paths: of the layers, in order.
    """

    def __init__(self, model: "PreTrainedModel", paths: Iterable[str]) -> None:
        paths = list(paths)
        places = paths_in(model, paths)
        self.model, self.paths = model, [places[path] for path in paths]

    def layer(self, index: int) -> nn.Module:
        """The module of a decoder layer."""
        return self.model.get_submodule(self.paths[index])

    @abstractmethod
    def opened(self, index: int) -> AbstractContextManager[None]:
        """Context manager in which all weights of a layer are in memory."""

    @abstractmethod
    def keep(self, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Have the tensors of these names in memory from now on, and return them."""

    def on_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as files hold them, of some that the model holds."""
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.model, dict(tensors)))


class HeldWeights(ModelWeights):
    """All of them in memory."""

    def opened(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def keep(self, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return trained


class StreamedWeights(ModelWeights):
    """Those of a layer are read whenever it runs, but for what is trained of them."""

    def __init__(self, streamed: "StreamedModel", paths: Iterable[str]) -> None:
        super().__init__(streamed.model, paths)
        attend_by_kernels(streamed.model)  # as one that is loaded as a whole
        self._streamed, self._conversions = streamed, conversions_of(streamed.model)
        self._kept: list[dict[str, Tensor]] = [{} for _ in self.paths]

    @contextmanager
    def opened(self, index: int) -> Iterator[None]:
        try:
            with self._streamed.layer(index):
                self._put_back(index)
                yield
        finally:
            self._put_back(index)

    def keep(self, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        found = dict(trained)
        for index, path in enumerate(self.paths):
            inside = [name for name in trained if name.startswith(f"{path}.")]
            with self._streamed.layer(index):
                held = {name: _copied(tensor_of(self.model, name)) for name in inside}
            self._kept[index] = held
            self._put_back(index)
            found |= held
        return found

    def on_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        vars(self.model)["_weight_conversions"] = self._conversions  # those of the last layer that was read
        return super().on_disk(tensors)

    def _put_back(self, index: int) -> None:
        """Have what is kept of a layer in its place, and gradients of nothing else, whether it is in memory or not."""
        self.layer(index).requires_grad_(False)
        for name, tensor in self._kept[index].items():
            put(self.model, name, tensor.requires_grad_(True))


def open_weights(
    checkpoint: Checkpoint,
    architecture: Architecture | DenseArchitecture,
    paths: Iterable[str],
    device: torch.device,
    *,
    streams: bool,
) -> ModelWeights:
    """Open a model in fp32, whole, or if it `streams` without its layers, which lie at these paths. Raises
    `InvalidInputError` for what transformers cannot load."""
    if not streams:
        return open_held(checkpoint, paths, device)
    return open_streamed(checkpoint, architecture, paths, device, torch.float32)


def open_streamed(
    checkpoint: Checkpoint,
    architecture: Architecture | DenseArchitecture,
    paths: Iterable[str],
    device: torch.device,
    dtype: torch.dtype,
) -> StreamedWeights:
    """Open a model in a dtype without its layers, which lie at these paths. Raises as `open_weights`."""
    from moetool.calibration.streaming import StreamedModel

    return StreamedWeights(StreamedModel(checkpoint, architecture, dtype, device), paths)


def open_held(
    checkpoint: Checkpoint, paths: Iterable[str], device: torch.device, *, paged: bool = False
) -> HeldWeights:
    """Load a whole model in fp32, or if it is `paged` with codes that stay in its mapped files. Raises as
    `runtime.loading.load_model`."""
    with described_in(checkpoint.path):
        return HeldWeights(load_model(checkpoint, torch.float32, device, paged=paged), paths)


def _copied(tensor: Tensor) -> Tensor:
    own = tensor.detach().clone()
    return nn.Parameter(own) if isinstance(tensor, nn.Parameter) else own.requires_grad_(True)


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of a full name."""
    path, _, last = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), last)
    return found


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Have the model compute with a tensor, which need not be a parameter, in place of that of a full name."""
    path, _, last = name.rpartition(".")
    module: Any = model.get_submodule(path)
    (module._parameters if last in module._parameters else module._buffers)[last] = tensor
