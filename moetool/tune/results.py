"""Fields that `moetool tune` adds to a job's result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetool.job.result import Details, Inlined


@dataclass(frozen=True, kw_only=True)
class Training(Inlined):
    """Outcome of one training.

    Attributes:
        steps: of the optimizer.
        training_seconds: of this run, which may have gone on with another.
        eval_loss: on held-out examples at the end, in nats, of the model as it is saved (sharded weights: before they
            are rounded as they are stored); `eval_perplexity` is its exponential.
        eval_loss_before: before the first step.
        mask_sparsity: share of SIMoE's masks that has closed.
        multiplier: λ of their constraint at the end.
        curve: what was logged on the way, in the order of steps: `step` and numbers by what they are.
    """

    steps: int
    training_seconds: float
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_loss_before: float | None = None
    mask_sparsity: float | None = None
    multiplier: float | None = None
    curve: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True, kw_only=True)
class TuningResult(Details):
    """Result of `moetool tune`.

    Attributes:
        examples: that were learnt.
        truncated: of them, how many lost their end.
        left_out: examples without anything to learn.
        answer_tokens: tokens to learn.
        begin: what all but conversations begin with, if anything.
        trained_parameters: numbers that could change.
        training: how it went.
    """

    examples: int
    truncated: int
    left_out: int
    answer_tokens: int
    begin: str | None
    trained_parameters: int
    training: Training
