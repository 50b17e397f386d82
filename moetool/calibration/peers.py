"""The processes among which the windows of a calibration text, and the experts of a layer, are shared out."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from moetool.architectures import MoEShape, Role
from moetool.numerics.gram import Gram

SaidT = TypeVar("SaidT")


def owners(costs: Sequence[float], count: int) -> list[int]:
    """Assign pieces of work to `count` processes by their costs: the costliest goes first, to the process with the
    least to do."""
    loads, chosen = [0.0] * count, [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: (-costs[piece], piece)):
        chosen[piece] = min(range(count), key=lambda owner: (loads[owner], owner))
        loads[chosen[piece]] += costs[piece]
    return chosen


class Peers:
    """Communication of a single process, which owns all work and waits for nobody; base class of that among several.

    Where there are several, all call the same in the same order.

    Attributes:
        rank: the number of this process, from 0.
        size: how many there are.
        here: how many of them share this machine and its memory.
    """

    rank, size, here = 0, 1, 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process of rank 0, which alone writes the journal and reports progress."""
        return self.rank == 0

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until all processes have arrived, calling `meanwhile` from time to time."""

    def broadcast(self, said: SaidT, owner: int = 0) -> SaidT:
        """Send a message of the process `owner` to all others, whose own arguments are ignored. A message is a number,
        text, tensor, or a list, tuple, set or dictionary of these."""
        return said

    def gather(self, said: SaidT) -> list[SaidT]:
        """Collect one object of every process, ordered by rank, in all processes."""
        return [said]

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over all processes. The order of the sum depends on their number."""

    def reduce(self, tensor: Tensor, owner: int) -> None:
        """Sum a contiguous tensor over all processes into that of `owner`; the tensors of the others are then
        undefined."""

    def part(self, count: int) -> range:
        """The share of this process among `count` things in a row: a contiguous range, of equal length up to one."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)


class Owned:
    """Assignment of the matrices of a layer's experts to processes; matrices of an expert that have the same inputs
    stay together.

    Attributes:
        peers: the processes.
    """

    def __init__(self, shape: MoEShape, peers: Peers, costs: Mapping[tuple[Role, int], float] | None = None) -> None:
        """By what each matrix, of a role and an expert, costs; in proportion to their sizes if nothing is said."""
        self.peers, self._groups = peers, shape.groups
        pieces = [(group, expert) for expert in range(shape.experts) for group in range(len(shape.groups))]

        def cost(group: int, expert: int) -> float:
            roles = shape.groups[group]
            return float(len(roles)) if costs is None else sum(costs.get((role, expert), 0.0) for role in roles)

        self._owners = dict(zip(pieces, owners([cost(*piece) for piece in pieces], peers.size), strict=True))

    @classmethod
    def by_first(cls, shape: MoEShape, peers: Peers) -> "Owned":
        """Assign the matrices of all experts to the process of rank 0."""
        alone = cls(shape, Peers())
        alone.peers = peers
        return alone

    @classmethod
    def by_expert(cls, shape: MoEShape, peers: Peers) -> "Owned":
        """Assign all matrices of an expert to one process, expert after expert in turn."""
        own = cls(shape, peers)
        own._owners = {(group, expert): expert % peers.size for group, expert in own._owners}
        return own

    def owner(self, role: Role, expert: int) -> int:
        """The rank of the process that has a matrix; the first's where it is not one of the routed experts'."""
        group = next(index for index, roles in enumerate(self._groups) if role in roles)
        return self._owners.get((group, expert), 0)

    def has(self, role: Role, expert: int) -> bool:
        """Whether the matrix of this role and expert is worked on by this process."""
        return self.owner(role, expert) == self.peers.rank


def summed_grams(grams: Sequence[Gram], peers: Peers) -> Tensor:
    """`[size, size]`, in their dtype: the sum of the Gram matrices of all processes, before `reduce_grams`."""
    total = torch.zeros_like(grams[0].matrix())
    for gram in grams:
        total += gram.matrix()
    peers.all_reduce(total)
    return total


def reduce_grams(grams: Sequence[Gram], owner: Callable[[int], int], peers: Peers) -> None:
    """Add up the Gram matrices of every expert over all processes for its owner; to the others its `count` is left."""
    counts = torch.tensor([gram.count for gram in grams])
    peers.all_reduce(counts)
    for expert, (gram, count) in enumerate(zip(grams, counts.tolist(), strict=True)):
        peers.reduce(gram.matrix(), owner(expert))
        if owner(expert) != peers.rank:
            gram.forget()
        gram.count = count
