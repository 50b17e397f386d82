"""Estimate of the seconds that a planned job will take on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moetool.costs.machine import this_machine
from moetool.job.job import pick_device
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.result import Json, PhaseTime


@dataclass(frozen=True)
class Estimate:
    """Seconds by phase, without those that Python and its libraries take to start.

    Attributes:
        phases: in order.
        unknown: why there are none, if there are none.
    """

    phases: Sequence[PhaseTime] = ()
    unknown: str | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds of all phases together; `None` where they are unknown."""
        return None if self.unknown else round(sum(phase.seconds for phase in self.phases), 2)

    def to_json(self) -> dict[str, Json]:
        """Return the fields `phases` and `seconds` of `--dry-run --json`; seconds are `null` if they cannot be
        predicted."""
        if self.unknown:
            return {"seconds": None}
        return {"phases": [phase.to_json() for phase in self.phases], "seconds": self.seconds}


def estimate(plan: Plan, options: RunOptions, output: Path) -> Estimate:
    """Estimate the seconds of each phase of a plan from this machine's speeds, which are measured if need be."""
    if not plan.phases:
        return Estimate(unknown=f"{plan.stage} says nothing of its work")
    try:
        machine = this_machine(pick_device(options.device), output)
    except OSError as error:
        return Estimate(unknown=f"this machine cannot be measured ({error})")
    return Estimate([PhaseTime(phase.name, round(machine.seconds(phase.work), 2)) for phase in plan.phases])
