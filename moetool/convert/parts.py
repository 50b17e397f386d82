"""The tensors of a converted model, each made from the dense one when it is its turn to be written."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from moetool.checkpoint.files import patch_config
from moetool.checkpoint.writer import InParts, TensorSpec
from moetool.format.entry import custom_entry
from moetool.format.kinds import CustomModule
from moetool.format.kinds.base import Counts
from moetool.runtime.dense import DenseModel

SpecT = TypeVar("SpecT", bound=CustomModule)

REST = -1  # the unit of everything that belongs to no layer


@dataclass(frozen=True)
class Made:
    """A tensor of the output: its name, dtype and shape, and a function that computes it when it is written."""

    spec: TensorSpec
    make: Callable[[], Tensor | InParts]


@dataclass(frozen=True, kw_only=True)
class Converted(ABC):
    """A model made from a dense one, tensor by tensor.

    Attributes:
        dense: the model that gives config and tokenizer.
        rest: models whose mean everything outside the experts is; `dense` alone unless they are given.
        dtype: to store everything in; `None` keeps each tensor's own.
        seed: of what is drawn.
    """

    dense: DenseModel
    rest: Sequence[DenseModel] = ()
    dtype: torch.dtype | None
    seed: int

    @abstractmethod
    def config(self) -> dict[str, object]:
        """Return the complete `config.json` of the result."""

    @abstractmethod
    def units(self) -> list[tuple[int, list[Made]]]:
        """Return the tensors by layer, those of no layer first.

        Raises:
            InvalidInputError: a tensor cannot be written.
        """

    @abstractmethod
    def parameters(self) -> Counts:
        """Count the elements of the model's tensors, in all and per token."""

    def names(self) -> dict[int, list[str]]:
        """Names of the dense model's tensors by layer, those of no layer under `REST`."""
        found: dict[int, list[str]] = {layer: [] for layer in range(REST, self.dense.layers)}
        for name in self.dense.checkpoint.tensors:
            found[self.dense.architecture.layer_of(name)].append(name)
        return found

    def dtype_entry(self) -> dict[str, str]:
        """The entry of `config.json` for the dtype, empty if the dtype stays."""
        if self.dtype is None:
            return {}
        source = self.dense.checkpoint.config
        key = "torch_dtype" if "torch_dtype" in source and "dtype" not in source else "dtype"
        return {key: str(self.dtype).removeprefix("torch.")}

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of `dtype` is written: the chosen one for floating-point numbers, else its
        own."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def copied(self, name: str, to: str | None = None) -> Made:
        """A tensor of the dense models, averaged over those of `rest`, under another name if one is given."""
        info = self.dense.checkpoint.info(name)
        spec = TensorSpec(to or name, self.stored(info.dtype), info.shape)
        return Made(spec, lambda: InParts(spec.dtype, spec.shape, self._blocks(name)))

    def zeros(self, name: str, shape: tuple[int, ...]) -> Made:
        """A tensor of zeros, in the dtype of the feed-forward networks."""
        dtype = self.stored(self.dense.dtype)
        return Made(TensorSpec(name, dtype, shape), lambda: torch.zeros(shape, dtype=dtype))

    def joined(self, name: str, shape: tuple[int, ...], parts: Sequence[Callable[[], Tensor]]) -> Made:
        """A tensor from parts that lie one below the other, in the dtype of the FFNs."""
        dtype = self.stored(self.dense.dtype)
        return Made(TensorSpec(name, dtype, shape), lambda: InParts(dtype, shape, (part().to(dtype) for part in parts)))

    def _blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor in flat blocks of the dtype to store."""
        dtype = self.stored(self.dense.checkpoint.info(name).dtype)
        models = [model for model in self.rest if name in model.checkpoint.tensors] or [self.dense]
        for blocks in zip(*(model.checkpoint.blocks(name) for model in models), strict=True):
            yield mean(blocks).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Customized(Converted, Generic[SpecT]):
    """A dense model with custom modules.

    Attributes:
        spec: what they are.
    """

    spec: SpecT

    def config(self) -> dict[str, object]:
        entry = custom_entry(self.spec)
        return patch_config(self.dense.checkpoint.config, {"quantization_config": entry, **self.dtype_entry()})

    def units(self) -> list[tuple[int, list[Made]]]:
        return [(layer, list(self.unit(layer, names))) for layer, names in self.names().items()]

    @abstractmethod
    def unit(self, layer: int, names: list[str]) -> Iterator[Made]:
        """The tensors of one layer, or of none (`REST`), where the dense model has those called `names`."""

    def parameters(self) -> Counts:
        shapes = {made.spec.name: made.spec.shape for _, unit in self.units() for made in unit}
        return self.spec.counts(self.dense.architecture, shapes)

    def kept(self, names: list[str]) -> Iterator[Made]:
        """Tensors of the dense model that are copied unchanged, under the names that they have beside custom
        modules."""
        return (self.copied(name, self._places[name]) for name in names)

    @cached_property
    def _places(self) -> dict[str, str]:
        return self.spec.moved(self.dense.architecture, self.dense.checkpoint.shapes)


def mean(parts: Sequence[Tensor]) -> Tensor:
    """The mean of several tensors, in fp32 whatever theirs are; the tensor itself if there is one."""
    return parts[0] if len(parts) == 1 else torch.stack([part.float() for part in parts]).mean(0)
