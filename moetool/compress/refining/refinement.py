"""Fine-tuning of stored experts towards the outputs that the original experts had.

Experts that are refined together lessen

    Σ_t ½ ‖ Σ_i w_ti (f_i(x_t; W') − f_i(x_t; W)) C ‖²

over calibration tokens t and their experts i, where W are the original matrices, W' what the stored tensors stand for,
w the router's weights, and C Cᵀ the second moment of the loss's gradient at the layer's output (`metric`). What is
stored, which of it gradients move and how far a step goes is a strategy: `codes` or `factors`. Parameters, targets and
errors are fp32; the experts' products are bf16 under autocast wherever `fast_products` says that this is faster.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from moetool.architectures import MoEShape, Role
from moetool.calibration.held_experts import HeldExperts
from moetool.calibration.routed_tokens import RoutedText
from moetool.numerics.precision import fast_products

ExpertMatrices = Mapping[Role, Tensor]  # of one expert, [out, in] fp32
RunExpert = Callable[[int, ExpertMatrices, Tensor], Tensor]  # an expert with given matrices on [tokens, hidden]

FEWEST = 32  # tokens to learn from, and tokens held out, below which nothing is refined
_HELD_OUT = 8  # one of so many windows is held out
_AT_ONCE = 4096  # tokens that are evaluated together


class RefinableExperts(ABC):
    """Experts of one layer in their stored form, as a strategy of refinement needs to see them."""

    @abstractmethod
    def matrices(self, expert: int) -> ExpertMatrices:
        """Decode the matrices of one expert, by role, to fp32."""


RefinableT = TypeVar("RefinableT", bound=RefinableExperts)


class MovingExperts(ABC, Generic[RefinableT]):
    """Stored experts while gradients move them: a strategy of refinement.

    Attributes:
        batch_tokens: tokens per step.
    """

    batch_tokens: ClassVar[int]

    @property
    @abstractmethod
    def can_move(self) -> bool:
        """Whether the stored experts have a tensor of floating point numbers that gradients can fit."""

    @abstractmethod
    def matrices(self, expert: int) -> ExpertMatrices:
        """The current matrices of one expert, from which gradients flow back to what moves."""

    @abstractmethod
    def step(self, step: int, steps: int) -> None:
        """Move against the gradients of the last loss, in step `step` of `steps`, and forget them."""

    @abstractmethod
    def stored(self) -> RefinableT:
        """Round the current values to the stored form and return the experts as they would be written."""


@dataclass(frozen=True, eq=False)
class Refined(Generic[RefinableT]):
    """Refined experts, and their loss before and after.

    Attributes:
        stored: the experts to be stored, which are those that were given if refining them made them no better.
        before: the loss of the given experts, summed over the tokens held out, in nats.
        after: the loss of `stored` there.
        is_better: whether `stored` was changed.
    """

    stored: RefinableT
    before: float
    after: float
    is_better: bool


@dataclass(frozen=True, eq=False)
class Refinement:
    """The target outputs of some experts, and the loop that fits stored experts to them.

    Attributes:
        run: computes one expert.
        original: gives the original matrices of an expert.
        learnt: the tokens that gradients are taken on.
        held_out: the tokens that decide whether the result is kept.
        metric: C `[hidden, hidden]`: an error e in the experts' summed output costs `½ ‖e C‖²` nats.
    """

    run: RunExpert
    original: Callable[[int], ExpertMatrices]
    learnt: RoutedText
    held_out: RoutedText
    metric: Tensor

    def refine(
        self, stored: RefinableT, moving: MovingExperts[RefinableT], steps: int, stream: torch.Generator
    ) -> Refined[RefinableT]:
        """Move the experts in so many steps on batches drawn from `stream`. They stay as they were `stored` if that
        does not lessen the loss on the tokens held out, or if there are fewer than `FEWEST` of either tokens."""
        if not moving.can_move or min(len(self.learnt), len(self.held_out)) < FEWEST:
            return Refined(stored, 0.0, 0.0, is_better=False)
        goal = self.outputs(self.original, self.held_out)
        before = self._loss(stored, goal)
        self._fit(moving, steps, stream)
        found = moving.stored()
        after = self._loss(found, goal)
        if not after < before:
            return Refined(stored, before, before, is_better=False)
        return Refined(found, before, after, is_better=True)

    def _fit(self, moving: MovingExperts[RefinableT], steps: int, stream: torch.Generator) -> None:
        target = self.outputs(self.original, self.learnt)
        for step, rows in enumerate(batches(len(target), moving.batch_tokens, steps, stream)):
            rows = rows.to(target.device)
            with torch.enable_grad():
                error = (self._sum(self._run_fast, moving.matrices, self.learnt[rows]) - target[rows]) @ self.metric
                (error.square().sum() / (2 * len(rows))).backward()
            moving.step(step, steps)

    def _run_fast(self, expert: int, matrices: ExpertMatrices, inputs: Tensor) -> Tensor:
        with fast_products(inputs.device):
            return self.run(expert, matrices, inputs).float()

    def _loss(self, stored: RefinableExperts, goal: Tensor) -> float:
        """The loss in nats, summed over the tokens held out, whose target outputs are the `goal`."""
        error = (self.outputs(stored.matrices, self.held_out) - goal) @ self.metric
        return 0.5 * float(error.square().sum(dtype=torch.float64))

    @torch.no_grad()
    def outputs(self, matrices: Callable[[int], ExpertMatrices], text: RoutedText) -> Tensor:
        """The routed sum of the experts' outputs with given matrices: `[tokens, hidden]` fp32."""
        parts = range(0, len(text), _AT_ONCE)
        return torch.cat([self._sum(self.run, matrices, text[start : start + _AT_ONCE]) for start in parts])

    @staticmethod
    def _sum(run: RunExpert, matrices: Callable[[int], ExpertMatrices], text: RoutedText) -> Tensor:
        result = torch.zeros(text.inputs.shape, device=text.inputs.device)
        for expert in text.experts:
            rows, inputs, weights = text.of(expert)
            if len(rows):
                result = result.index_add(0, rows, run(expert, matrices(expert), inputs) * weights)
        return result


def held_out_windows(windows: int) -> Tensor:
    """The windows that are not learnt from, `[windows]` bool: the last eighth, at least one. Windows of several texts
    take turns, so that each text has its share of them."""
    return torch.arange(windows) >= windows - max(1, windows // _HELD_OUT)


def batches(tokens: int, most: int, steps: int, stream: torch.Generator) -> Iterator[Tensor]:
    """Rows of the tokens of each step, at most `most`: every token comes once, in random order, before one comes
    again."""
    left = torch.empty(0, dtype=torch.int64)
    size = min(most, tokens)
    for _ in range(steps):
        if len(left) < size:
            left = torch.randperm(tokens, generator=stream)
        rows, left = left[:size], left[size:]
        yield rows


def run_expert(native: nn.Module, shape: MoEShape, expert: int, matrices: ExpertMatrices, inputs: Tensor) -> Tensor:
    """The output `[tokens, hidden]` of an expert with these matrices; `native` are transformers' fused experts, for
    their biases and activation function."""
    entering = torch.cat([matrices[role] for role in shape.entering]).unsqueeze(0)
    held = HeldExperts(native, range(expert, expert + 1), entering, matrices["down"].unsqueeze(0))
    return held.run(expert, inputs).output
