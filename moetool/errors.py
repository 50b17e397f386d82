"""Errors a user can cause, each with the exit code the command line ends with.

An error message says what was wrong, with the numbers, and what to do about it. Anything that is not a
`MoetoolError` is a bug and exits with 1.
"""

import difflib
import errno
import os
import signal
from collections.abc import Iterable

_UNUSABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries that write for us hide the number: safetensors behind Rust's words, torch.save behind its own.
_FULL_IN_WORDS = {
    **{f"(os error {number})": os.strerror(number) for number in _FULL},
    **{os.strerror(number): os.strerror(number) for number in _FULL},
    "PytorchStreamWriter failed writing": "torch.save could not write all of it",
    "inline_container.cc": "torch.save could not write all of it",
}


class MoetoolError(Exception):
    """Base class of all errors that moetool raises on purpose; their message says what is wrong and what to do."""

    exit_code = 1


class UsageError(MoetoolError):
    """An option is unknown, out of range or contradicts another one; the command exits with status 2."""

    exit_code = 2


class InvalidInputError(MoetoolError):
    """A checkpoint, a data set, a preset or a plan cannot be used as it is; the command exits with status 3."""

    exit_code = 3


class ResourceError(MoetoolError):
    """There is not enough memory or disk space for a job, or a file system refuses; the command exits with status 4."""

    exit_code = 4


class VerificationError(MoetoolError):
    """A result, written or about to be written, failed a check of its content; the command exits with status 5."""

    exit_code = 5


class InterruptedRunError(MoetoolError):
    """The job stopped on request; the same command with `--resume` continues it. The command exits with status 75."""

    exit_code = 75


def did_you_mean(said: str, known: Iterable[str]) -> str:
    """` Did you mean X?` for the name that comes nearest to what was said, or those that begin so, to end a
    message with; or nothing."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(said.lower(), names, n=1)
    close = close or [name for name in names if len(said) > 2 and name.startswith(said.lower())]
    return f" Did you mean {' or '.join(names[name] for name in close)}?" if close else ""


def option_of(name: str) -> str:
    """The option of the command line, as it is typed (`--group-size`), that sets a field (`group_size`) of options."""
    return "--" + name.replace("_", "-")


def in_one_line(error: BaseException, most: int) -> str:
    """A library's error message in one line of at most so many characters; the class's name if there is no message."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def full_disk(error: BaseException | None) -> str | None:
    """The system's words for a full disk, quota or file, if that is what an exception came of; `None` for any other."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return os.strerror(error.errno)
        if not isinstance(error, MoetoolError):
            for words, reason in _FULL_IN_WORDS.items():
                if words in str(error) and "PytorchStreamReader" not in str(error):
                    return reason
        error = error.__cause__ or error.__context__
    return None


def explained(error: Exception) -> MoetoolError | None:
    """The error to show to a user: one of ours, or what the system refused, as far as that is not a bug of ours."""
    if isinstance(error, ResourceError):
        return error
    if (reason := full_disk(error)) is not None:
        return ResourceError(f"Nothing more can be written: {reason} ({error}).")
    if isinstance(error, OSError) and error.errno in _UNUSABLE and error.filename is not None:
        return InvalidInputError(f"Cannot use {error.filename}: {os.strerror(error.errno)}.")
    return error if isinstance(error, MoetoolError) else None


def exit_code(error: BaseException) -> int:
    """What a process ends with after an error, as the command line and Python have it."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    problem = explained(error) if isinstance(error, Exception) else None
    return 1 if problem is None else problem.exit_code
