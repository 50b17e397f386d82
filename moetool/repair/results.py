"""Fields that `moetool repair` adds to a job's result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetool.job.result import Details, Result


@dataclass(frozen=True, kw_only=True)
class RepairResult(Details):
    """Result of `moetool repair`.

    Attributes:
        trains: what could change, as `--train` says it.
        trained_parameters: numbers that could.
        kept_step: the step whose values were written; 0 for those of the input.
        kl_before: nats per token that the input loses on held-out windows, by kind of text.
        kl_after: nats per token that the output loses on them.
        stopped: why training ended before its last step, if it did.
        learning_rate: that of the last steps: lower than at first where that proved too high.
        training_seconds: of the optimizer's steps and their evaluations.
        curve: by evaluation the step, and nats by kind of text.
    """

    trains: str
    trained_parameters: int
    kept_step: int
    kl_before: Mapping[str, float]
    kl_after: Mapping[str, float]
    stopped: str | None
    learning_rate: float
    training_seconds: float
    curve: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True, kw_only=True)
class RepairedResult(RepairResult):
    """Result of `--repair`: that of the repair, and that of the stage before it.

    Attributes:
        before_repair: what the command without `--repair` tells.
    """

    before_repair: Result
