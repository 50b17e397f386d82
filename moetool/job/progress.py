"""Interface for reporting progress: a job calls it, the command line draws bars from it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moetool.job.result import PhaseTime


class Progress:
    """Receives what a job is doing; this one draws nothing."""

    def expect(self, phases: Sequence[PhaseTime]) -> None:
        """Note which phases will come, and how long each is predicted to take."""

    def start(self, phase: str, total: int) -> None:
        """Begin a phase of `total` steps; 0 if nobody counts them."""

    def advance(self) -> None:
        """Note that one step is done."""

    def skip(self, steps: int) -> None:
        """Leave so many steps out, which an earlier run has done."""

    def finish(self, *, stopped: bool = False) -> None:
        """End the phase; `stopped` where it is not done, since something was raised in it."""

    def log(self, message: str) -> None:
        """Show a message on a line of its own."""


SILENT = Progress()


@contextmanager
def phase(progress: Progress, name: str, total: int) -> Iterator[None]:
    """Report a phase for the time of the `with` block; whatever is raised in it stops the phase."""
    progress.start(name, total)
    try:
        yield
    except BaseException:
        progress.finish(stopped=True)
        raise
    progress.finish()
