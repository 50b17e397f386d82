"""Interface for reporting progress: a job calls it, the command line draws bars from it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moetool.job.result import PhaseTime

BATCHES = "batches through layers"  # of a text that goes through a model layer by layer: of one batch a layer


class Progress:
    """Receiver of a job's progress; this base class ignores all of it, and displays override it."""

    def expect(self, phases: Sequence[PhaseTime]) -> None:
        """Note which phases will come, and how long each is predicted to take."""

    def start(self, phase: str, total: int, unit: str = "") -> None:
        """Begin a phase of `total` steps; 0 if their number is not known. Each step is one of `unit`: layers, windows,
        files ..."""

    def advance(self) -> None:
        """Count one step of the current phase as done."""

    def skip(self, steps: int) -> None:
        """Count so many steps of the current phase as done by an earlier run."""

    def finish(self, *, stopped: bool = False) -> None:
        """End the phase; `stopped` where it is not done, since something was raised in it."""

    def log(self, message: str) -> None:
        """Show a message for people on a line of its own."""


SILENT = Progress()


@contextmanager
def phase(progress: Progress, name: str, total: int = 0, unit: str = "") -> Iterator[None]:
    """Report a phase for the time of the `with` block; whatever is raised in it stops the phase.

    Args:
        progress: what it is reported to.
        name: of the phase.
        total: its steps; 0 if their number is not known.
        unit: what is counted, in the plural (layers, windows, files); without a comma, since it is told in a list.
    """
    assert unit or not total, f"{name}: {total} of what?"
    assert "," not in unit, unit
    progress.start(name, total, unit)
    try:
        yield
    except BaseException:
        progress.finish(stopped=True)
        raise
    progress.finish()
