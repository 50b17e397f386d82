"""Gram matrices of what every expert of a layer is given, of all at once or of some at a time."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from moetool.architectures import MoEShape, Role
from moetool.calibration.held_experts import ExpertRun, RoutedBatch, working_sets
from moetool.calibration.observation import Collector
from moetool.calibration.peers import Owned, Peers, reduce_grams, summed_grams
from moetool.calibration.slopes import SlopeSamples
from moetool.numerics.gram import Gram
from moetool.numerics.halved_gram import shrunk


class ExpertGrams:
    """`Σ x xᵀ [size, size]` of one input, by expert.

    Attributes:
        counts: `[experts]` int64, the tokens that each expert was given.
    """

    def __init__(
        self,
        experts: int,
        size: int,
        device: torch.device,
        at_once: int | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """With fewer `at_once` than there are `experts`, none are kept at first, but what `add_to_all` is given.
        All are added up in `dtype` (`Gram`)."""
        self._empty = partial(Gram, size, device, dtype)
        self.counts = torch.zeros(experts, dtype=torch.int64)
        self._own: dict[int, Gram] = {}
        self._all: Gram | None = None
        self._total: Tensor | None = None  # over several processes
        self._is_whole = at_once is None or at_once >= experts
        if self._is_whole:
            self.hold(range(experts))

    def hold(self, experts: range) -> None:
        """Drop the Gram matrices gathered so far and start empty ones for these experts."""
        self._own = {}
        self._own = {expert: self._empty() for expert in experts}

    def holds(self, expert: int) -> bool:
        """Whether the Gram matrix of an expert is among those being gathered."""
        return expert in self._own

    def add(self, expert: int, rows: Tensor) -> None:
        """Add `[tokens, size]` that an expert is given. Of one that is not held they are counted."""
        if (own := self._own.get(expert)) is None:
            self.counts[expert] += len(rows)
        else:
            own.add(rows)
            self.counts[expert] = own.count

    def add_to_all(self, rows: Tensor) -> None:
        """Add `[tokens, size]` to what the mean is of, unless it can be had from the experts' own."""
        if self._is_whole:
            return
        if self._all is None:
            self._all = self._empty()
        self._all.add(rows)

    def reduce(self, owner: Callable[[int], int], peers: Peers, *, sums: bool = True) -> None:
        """Sum over all processes, each of which holds all experts. The matrix of an expert goes to its `owner`, counts
        to all, and with `sums` the total over experts, too."""
        own = list(self._own.values())
        self._total = summed_grams(own, peers) if sums else None
        reduce_grams(own, owner, peers)
        self._own = dict(enumerate(own))
        self.counts = torch.tensor([gram.count for gram in own])

    def __getitem__(self, expert: int) -> Gram:
        """Gram matrix `[size, size]` of an expert that is held."""
        return self._own[expert]

    def mean(self) -> Tensor:
        """`[size, size]`, in their dtype: an average token's, zeros if there was none."""
        if self._all is not None:
            return self._all.matrix() / max(1, self._all.count)
        return self.total() / max(1, int(self.counts.sum()))

    def total(self) -> Tensor:
        """`[size, size]`, in their dtype: the sum over all experts, which are all in memory, here or elsewhere."""
        return summed_grams(list(self._own.values()), Peers()) if self._total is None else self._total


class HalvedExpertGrams:
    """`Σ x xᵀ [size, size]` fp32 of one input, by expert, each of two halves of the text, and shrunk as far as these
    disagree (`numerics.halved_gram`). The halves of an expert stand side by side in `ExpertGrams`."""

    def __init__(self, experts: int, size: int, device: torch.device, at_once: int | None) -> None:
        self._halves = ExpertGrams(2 * experts, size, device, at_once and 2 * at_once, torch.float32)

    @property
    def counts(self) -> Tensor:
        """`[experts]` int64, the tokens that each expert was given."""
        return self._halves.counts.view(-1, 2).sum(1)

    def hold(self, experts: range) -> None:
        """Drop the Gram matrices gathered so far and start empty ones for these experts."""
        self._halves.hold(range(2 * experts.start, 2 * experts.stop))

    def add(self, expert: int, rows: Tensor, is_second: Tensor) -> None:
        """Add `[tokens, size]` that an expert is given, of which some are in the second half, as bool `[tokens]`
        says."""
        self._halves.add(2 * expert, rows[~is_second])
        self._halves.add(2 * expert + 1, rows[is_second])

    def add_to_all(self, rows: Tensor) -> None:
        """Add `[tokens, size]` to what the mean is of, unless it can be had from the experts' own."""
        self._halves.add_to_all(rows)

    def reduce(self, owner: Callable[[int], int], peers: Peers) -> None:
        """Sum over all processes, each of which holds all experts. The matrix of an expert goes to its `owner`, counts
        and the total over experts to all."""
        self._halves.reduce(lambda half: owner(half // 2), peers)

    def mean(self) -> Tensor:
        """`[size, size]` fp32, not shrunk: an average token's, zeros if there was none."""
        return self._halves.mean()

    def matrix(self, expert: int) -> Tensor:
        """The shrunk sum `[size, size]` fp32 of an expert that is held."""
        one, other = (self._halves[2 * expert + half].matrix() for half in range(2))
        return shrunk(one + other, one)


class GramsInSets(Collector):
    """Gathers Gram matrices by expert, as many at once as there is room for.

    Attributes:
        inputs: of what gate and up are given.
        slopes: of the activations of each expert on a sample of its tokens, where they were asked for.
        is_first: whether everything is seen for the first time, and not some experts again.
    """

    def __init__(
        self,
        shape: MoEShape,
        inputs: ExpertGrams | HalvedExpertGrams,
        owned: Owned | None,
        at_once: int | None,
        slopes: SlopeSamples | None,
    ) -> None:
        """Of all experts, or of so many `at_once`. What an expert was given is gathered for the process that has it."""
        self.experts, self.is_first, self.inputs, self.slopes = shape.experts, True, inputs, slopes
        if slopes is not None and (at_once is None or at_once >= shape.experts):
            slopes.hold(range(shape.experts))
        self._owned = owned or Owned(shape, Peers())
        self._sets = working_sets(shape.experts, at_once or shape.experts)

    def observe_inputs(self, inputs: Tensor, routing: RoutedBatch) -> None:
        self.inputs.add_to_all(inputs if routing.is_even else inputs[routing.rows.to(inputs.device)])

    def tokens(self) -> Tensor:
        """Number of tokens routed to each expert so far, `[experts]` int64."""
        return self.inputs.counts.clone()

    def observe(self, expert: int, windows: Tensor, inputs: Tensor, work: ExpertRun) -> None:
        if self.slopes is not None:
            self.slopes.observe(expert, work)

    def at(self, position: int) -> None:
        if self.slopes is not None:
            self.slopes.at(position)

    def hold(self, experts: range) -> None:
        """Start gathering what is known of each of these experts, to be filled by the next pass over the text."""
        self.inputs.hold(experts)
        if self.slopes is not None:
            self.slopes.hold(experts)

    def reduce(self, peers: Peers) -> None:
        if peers.size == 1:
            return
        self.inputs.reduce(partial(self._owned.owner, "up"), peers)
        if self.slopes is not None:
            self.slopes.reduce(partial(self._owned.owner, "up"), peers)

    def seen(self) -> None:
        """Hook that finishes the Gram matrices of the experts being gathered, once all tokens have been observed."""

    def sets(self) -> Iterator[range]:
        """All experts, set by set: those whose Gram matrices are there for the time that a set is in hand."""
        if self.again is None:
            yield range(self.experts)
            return
        self.is_first = False
        for experts in self._sets:
            self.hold(experts)
            self.again(self, experts)
            self.seen()
            yield experts

    def matrices(self, roles: Sequence[Role]) -> Iterator[tuple[Role, int]]:
        """Iterate over all matrices of all experts as (role, expert), one working set of experts after the other."""
        return ((role, expert) for experts in self.sets() for role in roles for expert in experts)
