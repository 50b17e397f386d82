"""Errors a user can cause, each with the exit code the command line ends with.

An error message says what was wrong, with the numbers, and what to do about it. Anything that is not a
`MoetoolError` is a bug and exits with 1.
"""

import difflib
from collections.abc import Iterable


class MoetoolError(Exception):
    """Base of every error moetool raises on purpose."""

    exit_code = 1


class UsageError(MoetoolError):
    """An option that is unknown, out of range or contradicts another."""

    exit_code = 2


class InvalidInputError(MoetoolError):
    """A checkpoint, a data set or a recipe that cannot be used."""

    exit_code = 3


class ResourceError(MoetoolError):
    """Not enough memory or disk."""

    exit_code = 4


class VerificationError(MoetoolError):
    """What was written, or is about to be written, is wrong."""

    exit_code = 5


class InterruptedRunError(MoetoolError):
    """Stopped on request; the same command with `--resume` goes on where it stopped."""

    exit_code = 75


def did_you_mean(said: str, known: Iterable[str]) -> str:
    """` Did you mean X?` for the name that comes nearest to what was said, to end a message with, or nothing."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(said.lower(), names, n=1)
    return f" Did you mean {names[close[0]]}?" if close else ""
