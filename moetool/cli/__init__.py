"""The command line. Importing it must stay instant: nothing heavy before a command runs."""

import sys


def main() -> None:
    """Entry point of the `moetool` script."""
    from moetool.cli.app import app

    sys.exit(app())
