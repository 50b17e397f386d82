"""How a job tells where it is. The pipeline reports, the command line draws."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moetool.job.result import PhaseTime


class Progress:
    """Receives what a job is doing; this one draws nothing."""

    def expect(self, phases: Sequence[PhaseTime]) -> None:
        """Note which phases will come, and how long each is predicted to take."""

    def start(self, phase: str, total: int) -> None:
        """A phase of `total` steps begins; 0: nobody counts them."""

    def advance(self) -> None:
        """Note that one step is done."""

    def skip(self, steps: int) -> None:
        """So many steps had been done by an earlier run."""

    def finish(self, *, stopped: bool = False) -> None:
        """The phase is over; `stopped` where it is not done, since something was raised in it."""

    def log(self, message: str) -> None:
        """Show a message on a line of its own."""


SILENT = Progress()


@contextmanager
def phase(progress: Progress, name: str, total: int) -> Iterator[None]:
    """A phase as a `with` block, which is stopped by whatever is raised in it."""
    progress.start(name, total)
    try:
        yield
    except BaseException:
        progress.finish(stopped=True)
        raise
    progress.finish()
