"""Base class of custom module kinds: number of experts, names of tensors, parameter counts.

A kind is a frozen spec, which the `config.json` of such a model has as an entry of `quantization_config`. The module
itself is `runtime/modules/{name}.py`, whose function `insert(model, dense, spec)` builds it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from moetool.architectures.dense import DenseArchitecture
from moetool.errors import InvalidInputError
from moetool.format.fields import ExpertCount, explain

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # of all tensors of a checkpoint, by name

# Of the one number that stands where a dense model had a weight, so that nothing else loads the result.
PLACEHOLDER: tuple[int, int] = (1, 1)


class Counts(NamedTuple):
    """Numbers in a model without its placeholders: all, those that one token uses, those that the dense model it was
    made of has not."""

    total: int
    active: int
    added: int


class Mask(NamedTuple):
    """The masks of a linear layer's experts, which open and close some of its inputs.

    Attributes:
        tensor: the name of what is stored of them, a row per expert.
        channels: the layer's inputs.
        is_trained: they are trained still, and the tensor holds log φ; gates if not.
    """

    tensor: str
    channels: int
    is_trained: bool


class CustomModule(BaseModel, ABC):
    """One kind of custom module, as the config of a model describes it.

    Attributes:
        name: the file of the kind in this directory, and of its module in `runtime/modules`.
        key: of its entry in `quantization_config`.
        what: what a model with it is, as error messages say it.
        made: what happened to such a model.
        title: what `inspect` calls it.
        commands: those of moetool that take it, in words.
        closed: ends of the names of tensors that are gone once the model is trained.
        whole: what of it can only be trained in one piece, in words.
        experts: per layer, or linear layer.
    """

    model_config = ConfigDict(frozen=True)

    name: ClassVar[str]
    key: ClassVar[str]
    what: ClassVar[str]
    made: ClassVar[str]
    title: ClassVar[str]
    commands: ClassVar[str] = "tune, eval, routing, bench, generate, chat, serve, inspect, verify and report"
    closed: ClassVar[tuple[str, ...]] = ()
    whole: ClassVar[str | None] = None

    experts: ExpertCount

    @classmethod
    def from_config(cls, described: object) -> Self:
        """The spec that an entry of `config.json` describes; keys that are not known are left out.

        Raises:
            InvalidInputError: a field is missing or not what it has to be; the message names it.
        """
        try:
            return cls.model_validate(dict(described) if isinstance(described, Mapping) else described)
        except ValidationError as error:
            raise InvalidInputError(f"quantization_config: {explain(error, cls.key)}.") from error

    def to_config(self) -> dict[str, object]:
        """Return the kind's entry of `quantization_config`, which `from_config` reads back."""
        return self.model_dump(mode="json")

    @property
    @abstractmethod
    def at_work(self) -> int:
        """Number of experts per layer that one token uses."""

    @property
    @abstractmethod
    def rule(self) -> str:
        """A sentence for people on how experts are chosen for a token."""

    def settled(self, channels: Mapping[str, int]) -> Self:
        """This kind after training, with so many channels left of each linear layer that it has closed some of."""
        return self

    def among(self, layers: int) -> tuple[int, ...]:
        """Indices of the decoder layers, of `layers` in all, that have a module of this kind."""
        return tuple(range(layers))

    def check(self, dense: DenseArchitecture, layers: int | None, hidden: int | None) -> None:
        """Compare the spec with the rest of `config.json`, of which missing entries are given as `None`.

        Raises:
            InvalidInputError: it does not fit the model.
        """
        if layers is not None and (absent := [layer for layer in self.among(layers) if layer >= layers]):
            raise self.refusal(f"layers has {absent}, and the model has {layers} layers")

    def refusal(self, what: str) -> InvalidInputError:
        """Make the error for a field of this kind's entry in `config.json` that is `what`: missing, or of a wrong
        value."""
        return InvalidInputError(f"quantization_config: {self.key}.{what}.")

    @abstractmethod
    def moved(self, dense: DenseArchitecture, shapes: Shapes) -> dict[str, str]:
        """The tensors of a dense model that the converted one has, some of them under other names.

        Args:
            dense: its family.
            shapes: of its tensors, by name.
        """

    @abstractmethod
    def new(self, dense: DenseArchitecture, shapes: Shapes) -> set[str]:
        """Names of the tensors of a converted model that the dense one lacks, without placeholders.

        Args:
            dense: the family of the dense model.
            shapes: of the converted model's tensors, by name.
        """

    @abstractmethod
    def idle(self, dense: DenseArchitecture, shapes: Shapes) -> int:
        """Numbers of a converted model, whose shapes are given, that one token does not use."""

    def masks(self, shapes: Shapes) -> Mapping[str, Mask] | None:
        """Names of the expert masks of every linear layer, by the layer's name; `None` for kinds whose experts are no
        masks.

        Args:
            shapes: of a converted model's tensors, by name.
        """
        return None

    def counts(self, dense: DenseArchitecture, shapes: Shapes) -> Counts:
        """Numbers in a converted model, from the shapes of its tensors."""
        total = sum(math.prod(shape) for shape in shapes.values() if shape != PLACEHOLDER)
        added = numbers(shapes, self.new(dense, shapes))
        return Counts(total, total - self.idle(dense, shapes), added)


class RoutedModule(CustomModule):
    """A kind of custom module whose router chooses `top_k` of its experts for every token."""

    top_k: ExpertCount

    @model_validator(mode="after")
    def _choice(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, more than the {self.experts} experts")
        return self

    @property
    def at_work(self) -> int:
        return self.top_k


def numbers(shapes: Shapes, names: Iterable[str]) -> int:
    """Count the elements of the named tensors, by their shapes."""
    return sum(math.prod(shapes[name]) for name in names)


def network_tensors(dense: DenseArchitecture, layer: int, names: Iterable[str]) -> dict[str, str]:
    """The tensors of one layer's feed-forward network by name, and what each is called relative to it where it is put
    into a module of moetool's."""
    there = {*names}
    return {name: inside for name, inside in dense.tensors(layer).items() if name in there}


def with_networks_inside(dense: DenseArchitecture, layers: Iterable[int], names: Iterable[str]) -> dict[str, str]:
    """New names of a dense model's tensors, by their old ones, where the feed-forward networks of some layers lie as
    `ffn` in a module of moetool's; all other tensors keep their names."""
    found = {name: name for name in names}
    for layer in layers:
        inner = network_tensors(dense, layer, found)
        found |= {name: f"{dense.ffn_prefix(layer)}ffn.{inside}" for name, inside in inner.items()}
    return found
