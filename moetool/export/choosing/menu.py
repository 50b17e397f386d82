"""Choice of a type for each tensor of a result, within a budget of bytes, by the estimated loss of each type."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from moetool.checkpoint.sizes import format_bytes, format_least_bytes
from moetool.compress.budget.items import Group, offered
from moetool.compress.budget.spending import allocate
from moetool.errors import UsageError
from moetool.export.choosing.written import WrittenTensor


class NamedKind(Protocol):
    """A type in which an engine stores the numbers of a tensor."""

    @property
    def name(self) -> str:
        """Name of the type, as the engine has it."""

    def size(self, numbers: int) -> int:
        """Size in bytes of so many elements in this type."""


KindT = TypeVar("KindT", bound=NamedKind)


@dataclass(frozen=True)
class Menu(Generic[KindT]):
    """The types on offer for the tensors of a result.

    Attributes:
        tensors: all tensors of the result.
        types: those on offer by the tensor's name, the smallest first; tensors that stay as they are have no entry.
        engine: that has the types.
        floor: in words, what keeps a result from being smaller than the smallest types make it.
    """

    tensors: Sequence[WrittenTensor]
    types: Mapping[str, tuple[KindT, ...]]
    engine: str
    floor: str

    def nbytes(self, chosen: Mapping[str, KindT]) -> int:
        """Bytes of all tensors with the types that were chosen, without padding."""
        return sum(
            chosen[tensor.name].size(tensor.numbers) if tensor.name in chosen else tensor.nbytes
            for tensor in self.tensors
        )

    @cached_property
    def numbers(self) -> int:
        """Number of elements that all tensors have together."""
        return sum(tensor.numbers for tensor in self.tensors)

    def bits_per_weight(self, chosen: Mapping[str, KindT]) -> float:
        """The bits per number over all tensors, as llama.cpp tells it."""
        return 8 * self.nbytes(chosen) / self.numbers

    @property
    def smallest(self) -> dict[str, KindT]:
        """Choose the smallest type on offer for each tensor."""
        return {name: types[0] for name, types in self.types.items()}

    @property
    def largest(self) -> dict[str, KindT]:
        """Choose the largest type on offer for each tensor."""
        return {name: types[-1] for name, types in self.types.items()}

    def budget(self, target: float, mixture: str | None = None) -> int:
        """Bytes of all tensors at so many bits per weight, typed as a number or as a `mixture` of llama-quantize.

        Raises:
            UsageError: no types are that small.
        """
        least, most = (self.bits_per_weight(chosen) for chosen in (self.smallest, self.largest))
        if least > target:
            asked = f"--target-bpw {target:g}" if mixture is None else f"--type {mixture}, {target:g} bits per weight,"
            raise UsageError(
                f"{asked} is less than this model can have: {self.floor}. With the largest types on "
                f"offer it has {most:.2f} bits per weight, with the smallest types {math.ceil(100 * least) / 100:.2f}."
            )
        return int(target / 8 * self.numbers)

    def budget_within(self, size: int, around: int, *, has_experts: bool) -> int:
        """Bytes of all tensors in a result of at most `size` bytes, of which so many `around` them are no numbers'.
        Raises `UsageError` where no types are that small."""
        least, most = self.sizes(around)
        if size < least:
            fewer = ", or first take out experts (compress --method reap)" if has_experts else ""
            raise UsageError(
                f"--size {format_bytes(size)}: in {self.engine}'s types this model takes from "
                f"{format_least_bytes(least)} to {format_bytes(most)}: {self.floor}. Give more{fewer}."
            )
        return size - around

    def sizes(self, around: int) -> tuple[int, int]:
        """Least and most bytes of a result, of which so many `around` the tensors are no numbers'."""
        least, most = (around + self.nbytes(chosen) for chosen in (self.smallest, self.largest))
        return least, most

    def choose(self, budget: int, losses: Mapping[str, Sequence[float]]) -> dict[str, KindT]:
        """The types with which a result whose tensors take at most `budget` bytes loses least (`compress.budget`).

        Args:
            budget: bytes, no fewer than the smallest types take.
            losses: by name, of each type; those of a tensor with one type may be missing.
        """
        open_ = [tensor for tensor in self.tensors if len(self.types.get(tensor.name, ())) > 1]
        items = {
            (tensor.layer, tensor.name, 0): offered(
                types, [kind.size(tensor.numbers) for kind in types], losses[tensor.name]
            )
            for tensor in open_
            for types in [self.types[tensor.name]]
        }
        fixed = self.nbytes(self.smallest) - sum(int(item.nbytes[0]) for item in items.values())
        found = allocate("water-filling", [Group(items)], budget - fixed)
        return self.smallest | {name: kind for (_, name, _), kind in found.items()}


def counted_types(chosen: Mapping[str, KindT]) -> str:
    """Describe how many tensors have each type, the most frequent first: `12 q4_K, 4 q6_K`."""
    return ", ".join(f"{count} {name}" for name, count in Counter(kind.name for kind in chosen.values()).most_common())
