"""The command line. Importing it must stay instant: nothing heavy before a command runs."""

import atexit
import logging
import os
import signal
import sys

from moetool.cli.streams import secure_streams
from moetool.errors import InterruptedRunError, explained


class _Stopped(SystemExit):
    """SIGTERM, where no job is at work that would finish the unit in hand."""


def _stop(*_: object) -> None:
    raise _Stopped(InterruptedRunError.exit_code)


def main() -> None:
    """Entry point of the `moetool` script: sets the environment that libraries read when they load, and runs the
    command."""
    secure_streams()
    # Threads that wait by spinning take the core from the one they wait for, on a machine that does anything else: six
    # times slower beside one busy neighbour. Read when torch is loaded, so it has to be said before.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # What it says of kernels that it could do with is for those who use them.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Imports take seconds; a job that is asked to stop before it began is as resumable as any.
    signal.signal(signal.SIGTERM, _stop)
    # What the command ends with is settled then; Python closes for up to a second, in which SIGTERM would replace it.
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    try:
        from moetool.cli.app import app

        try:
            app()
        finally:
            sys.stdout.flush()  # help, too, can be too much for a disk
    except _Stopped:
        print("interrupted", file=sys.stderr)
        raise
    except OSError as error:
        if (problem := explained(error)) is None:
            raise
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)
