"""What the choice of types and codes asks of an export, whatever format it writes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from moetool.architectures import Role
from moetool.checkpoint.experts import ExpertReader


class WrittenTensor(Protocol):
    """A tensor of the result: a matrix, those of all experts of a layer and role, or a vector."""

    @property
    def name(self) -> str:
        """Name of the tensor in the result."""

    @property
    def layer(self) -> int:
        """The decoder layer that it is of; −1 outside of all layers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor: `[out, in]`, or `[experts, out, in]`."""

    @property
    def numbers(self) -> int:
        """Number of elements of the tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes unless a type is chosen for it."""

    @property
    def parts(self) -> Callable[[], Iterator[Tensor]]:
        """Reads its rows in order: of experts a matrix at a time, of others some rows."""


@dataclass(frozen=True)
class WatchedModule:
    """A linear module of a loaded layer, and the matrices of the result that its weight becomes.

    Attributes:
        module: the module.
        shapes: `[out, in]` of each matrix, by its name in the result.
        apart: gradients `[out, tokens]` at the module's outputs as those at the rows of each matrix.
    """

    module: nn.Module
    shapes: Mapping[str, tuple[int, int]]
    apart: Callable[[Tensor], Sequence[Tensor]] = lambda gradients: [gradients]


class WrittenModel(Protocol):
    """Where the matrices of a result come from in the model that it is made of."""

    @property
    def experts(self) -> ExpertReader | None:
        """Reader of the model's experts; `None` for a dense model."""

    @property
    def layers(self) -> int:
        """Number of decoder layers of the model."""

    @property
    def embeddings(self) -> str:
        """Name that the tensor of token embeddings has in the result."""

    @property
    def head(self) -> str | None:
        """Name of the head in the result; `None` where the embeddings are the head, too."""

    def watched(self, layer: int, module: nn.Module) -> dict[str, WatchedModule]:
        """Return, by path, the linear modules of a loaded layer whose matrices can have few bits, without experts."""

    def expert_tensor(self, layer: int, role: Role) -> str:
        """Name of what holds the matrices of all experts of a layer in one role."""

    def counted_embeddings(self, rows: Tensor) -> Tensor:
        """How much each row of the embeddings counts, from how much it counts `[vocabulary]` in the model's own."""
