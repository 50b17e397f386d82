"""The command line. Importing it must stay instant: nothing heavy before a command runs."""

import signal
import sys

from moetool.errors import InterruptedRunError


def main() -> None:
    """Entry point of the `moetool` script."""
    # Imports take seconds; a job that is asked to stop before it began is as resumable as any.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(InterruptedRunError.exit_code))
    from moetool.cli.app import app

    sys.exit(app())
