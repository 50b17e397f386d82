"""Items of a byte budget: the forms of every matrix with their bytes and losses, and groups of matrices.

An item is one matrix. Its forms come from a spectrum, where the loss at every rank is known in advance: the energy
beyond the k largest whitened singular values, weighted by how sensitive the model is to errors in that matrix. Or they
were made and measured one by one. Either way a form is a point (bytes, loss), and which one is cheapest at a price λ
per byte, in loss + λ · bytes, is read from the slopes of the lower convex hull of these points.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import neg
from typing import Generic

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVar

from moetool.architectures import Role
from moetool.numerics.arrays import Floats, Integers
from moetool.representations import Representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank, break_even_rank
from moetool.representations.quantized import Quantized
from moetool.representations.shared_factor import SharedU, SharedV

Key = tuple[int, Role, int]  # layer, role, expert
Forms = dict[Key, Representation]  # the form of every matrix; those of groups that stay as they were are missing
CODED_GROUP = 128  # numbers of a coded factor that share a scale
ItemKeyT = TypeVar("ItemKeyT", bound=tuple[int, str, int], default=Key)  # what begins with a layer
FormT = TypeVar("FormT", default=Representation)
Factors = type[LowRank] | type[SharedU] | type[SharedV]  # how factors of a rank above 0 are stored


@dataclass(frozen=True, eq=False)
class Item(Generic[FormT]):
    """One matrix with the n forms that it is offered in.

    Attributes:
        forms: forms from the smallest to the best; items of one kind may hold the same sequence.
        nbytes: `[n]`, stored bytes of each form, rising.
        losses: `[n]`, estimated loss of each form, falling.
        slopes: loss removed per byte on every edge of the lower convex hull of (bytes, loss), falling. The hull has all
            forms up to some place, and the last.
        steps: how many of the ways from one form to the next are small; a leap to the last form may go beyond.
    """

    forms: Sequence[FormT]
    nbytes: Integers
    losses: Floats
    slopes: Floats
    steps: int

    @property
    def last(self) -> int:
        """Index of the largest form, which loses least."""
        return len(self.losses) - 1

    def at(self, price: float) -> int:
        """The form with the least loss + price · bytes, and of several the smallest."""
        taken = bisect_left(self.slopes, -price, key=neg)
        return taken if taken < len(self.slopes) else self.last

    def cost(self, before: int, after: int) -> tuple[int, float]:
        """Bytes that another form takes more, and loss that it removes."""
        return int(self.nbytes[after] - self.nbytes[before]), float(self.losses[before] - self.losses[after])

    @cached_property
    def step_bytes(self) -> int | None:
        """Bytes of the smallest step, or of the leap if there is none; `None` for a single form."""
        return int(np.diff(self.nbytes)[: max(self.steps, 1)].min()) if self.last else None


def whole_of(shape: tuple[int, int], bits: int | None) -> Representation:
    """Full-rank form of a matrix `[out, in]`: the matrix itself, or its delta in codes of `bits`."""
    return Dense() if bits is None else Quantized(bits, CODED_GROUP).fitted(shape)


def factors_of(shape: tuple[int, int], rank: int, factors: Factors, bits: int | None = None) -> Representation:
    """Form of a matrix `[out, in]` at a given rank, in codes of `bits` if any, or whole where that costs no more."""
    if rank > break_even_rank(shape):
        return whole_of(shape, bits)
    plain = factors(rank) if rank else LowRank(0)
    return plain if bits is None else plain.quantized(bits, CODED_GROUP).fitted(shape)


@dataclass(frozen=True)
class Ladder:
    """The forms of all matrices of one shape `[out, in]` by rank: each below break-even, then the matrix itself.

    Attributes:
        shape: of the matrix.
        dtype: of the model.
        multiple: ranks come in multiples of this.
        factors: how they are stored.
        bits: of codes that factors are stored in, and the delta where these are no smaller; `None` for the model's
            numbers. What codes lose is not counted, so they should have 8.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    multiple: int = 1
    factors: Factors = LowRank
    bits: int | None = None

    def _at(self, rank: int) -> Representation:
        return factors_of(self.shape, rank, self.factors, self.bits)

    @cached_property
    def step_bytes(self) -> int:
        """Bytes by which the stored factors grow with each step of `multiple` in rank."""
        form = self._at(self.multiple)
        shared = sum(stored.nbytes(self.dtype) for stored in form.shared_tensors(self.shape).values())
        return form.nbytes(self.shape, self.dtype) + shared

    @cached_property
    def dense_bytes(self) -> int:
        """Size of the whole matrix in bytes, stored without a delta's form."""
        return whole_of(self.shape, self.bits).nbytes(self.shape, self.dtype)

    @cached_property
    def steps(self) -> int:
        """Number of steps in rank up to which factors take fewer bytes than the whole matrix."""
        return min(break_even_rank(self.shape) // self.multiple, (self.dense_bytes - 1) // self.step_bytes)

    @cached_property
    def _forms(self) -> list[Representation]:
        return [*(self._at(step * self.multiple) for step in range(self.steps + 1)), whole_of(self.shape, self.bits)]

    @cached_property
    def _nbytes(self) -> Integers:
        return np.append(np.arange(self.steps + 1, dtype=np.int64) * self.step_bytes, self.dense_bytes)

    def item(self, spectrum: Tensor, energy: float) -> Item:
        """The item of one matrix of that shape.

        Args:
            spectrum: fp64, weighted squared whitened singular values, descending, at least as many as ranks pay.
            energy: their sum over all, including those not listed.
        """
        gains = spectrum[: self.steps * self.multiple].reshape(self.steps, self.multiple).sum(1).numpy()
        rests = np.maximum(energy - np.append(0.0, np.cumsum(gains)), 0.0)
        # From some step on, going straight to dense removes more per byte than the next step: there the hull ends.
        leaps = rests / (self.dense_bytes - self._nbytes[:-1])
        slopes = gains / self.step_bytes
        place = int(np.append(leaps[:-1] >= slopes, True).argmax())
        hull = np.append(slopes[:place], leaps[place])
        return Item(self._forms, self._nbytes, np.append(rests, 0.0), np.minimum.accumulate(hull), self.steps)


def dropped(energy: float) -> Item:
    """Make the item of a matrix whose delta is to be dropped at whatever loss."""
    return Item([LowRank(0)], np.zeros(1, dtype=np.int64), np.array([energy]), np.empty(0), 0)


def offered(forms: Sequence[FormT], nbytes: Sequence[int], losses: Sequence[float]) -> Item[FormT]:
    """The item of a matrix whose forms were measured, in any order; forms that are best at no price are left out."""

    def slope(smaller: int, larger: int) -> float:
        return (losses[smaller] - losses[larger]) / (nbytes[larger] - nbytes[smaller])

    hull: list[int] = []
    for index in sorted(range(len(forms)), key=lambda i: (nbytes[i], losses[i])):
        if hull and losses[index] >= losses[hull[-1]]:
            continue
        while len(hull) > 1 and slope(hull[-1], index) >= slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(index)
    return Item(
        [forms[i] for i in hull],
        np.array([nbytes[i] for i in hull], dtype=np.int64),
        np.array([losses[i] for i in hull]),
        np.array([slope(*edge) for edge in pairwise(hull)]),
        len(hull) - 1,
    )


@dataclass(frozen=True, eq=False)
class Group(Generic[FormT, ItemKeyT]):
    """Matrices that share a decision: to be deltas to a base, or to be left as they were without loss.

    Attributes:
        items: by layer, role and expert.
        base_bytes: bytes that they take together beside their forms.
        native_bytes: bytes that they take if nothing is done to them; `None` if that is not offered.
    """

    items: Mapping[ItemKeyT, Item[FormT]]
    base_bytes: int = 0
    native_bytes: int | None = None

    @property
    def least(self) -> int:
        """Bytes of the group with the smallest form of every item, its base included."""
        return self.base_bytes + sum(int(item.nbytes[0]) for item in self.items.values())

    @property
    def most(self) -> int:
        """Bytes of the group with the form of every item that loses least, or of the group left as it is."""
        if self.native_bytes is not None:
            return self.native_bytes
        return self.base_bytes + sum(int(item.nbytes[-1]) for item in self.items.values())

    @cached_property
    def _edges(self) -> tuple[Floats, Integers, Floats]:
        """Edges of all items' hulls, steepest first: slopes, and bytes and loss after so many edges are taken."""
        slopes, sizes, gains = [np.empty(0)], [np.empty(0, dtype=np.int64)], [np.empty(0)]
        for item in self.items.values():
            hull = np.append(np.arange(len(item.slopes)), item.last)
            slopes.append(item.slopes)
            sizes.append(np.diff(item.nbytes[hull]))
            gains.append(-np.diff(item.losses[hull]))
        falling = np.concatenate(slopes)
        order = np.argsort(-falling, kind="stable")
        left = np.append(np.concatenate(gains)[order], sum(item.losses[-1] for item in self.items.values()))
        # Summed from the flat end, so that what little is left there keeps its digits.
        loss = np.cumsum(left[::-1])[::-1]
        return falling[order], self.least + np.append(0, np.cumsum(np.concatenate(sizes)[order])), loss

    def spent(self, price: float) -> tuple[int, float]:
        """Bytes and loss of the items, each in its best form at a price."""
        slopes, sizes, losses = self._edges
        taken = bisect_left(slopes, -price, key=neg)
        return int(sizes[taken]), float(losses[taken])

    def at(self, price: float) -> int | None:
        """Bytes of the best choice at a price; `None` if that is to leave the group as it was."""
        size, loss = self.spent(price)
        if self.native_bytes is not None and loss + price * size >= price * self.native_bytes:
            return None
        return size


def byte_range(groups: Sequence[Group[FormT, ItemKeyT]]) -> tuple[int, int]:
    """Least and most bytes that the groups can take: all forms at their smallest, and at their best."""
    return sum(group.least for group in groups), sum(group.most for group in groups)
