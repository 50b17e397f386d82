"""Standard streams: input read alike in any locale, output written at once, and a log that nobody needs to read."""

import errno
import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_GONE = (errno.EPIPE, errno.EIO)  # whoever read a pipe has ended; a terminal was closed


class _Output(FileIO):
    """File of standard output. Nothing is written any more once its reader has gone (`is_lost`), which is no error:
    a command ends with its own exit code. Any other error, such as a full disk, is raised once.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.is_lost = False

    def write(self, data: "ReadableBuffer", /) -> int:
        if not self.is_lost:
            try:
                return super().write(data)
            except OSError as error:
                self.is_lost = True
                if error.errno not in _GONE:
                    raise
        return memoryview(data).nbytes


class _Log(FileIO):
    """File of standard error. What cannot be written (full disk, closed terminal, no reader) is dropped: a job that
    nobody watches any more goes on."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            written: int | None = super().write(data)  # `None`: a full pipe that is not to be waited for
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def secure_streams() -> None:
    """Put standard streams in order, before anything is read or written.

    One that was closed becomes /dev/null: else the first file that is opened gets its number, and then what a library
    prints. Standard error drops what it cannot write.
    """
    for descriptor in range(3):  # in order: a file gets the lowest number that is free
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is sys.__stdout__:  # else somebody who calls this from Python has put another there
        sys.stdout = _text(_Output(1), sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Log(2), sys.stderr)


def _text(file: FileIO, like: TextIO | None) -> TextIO:
    """A stream of text in a file, in the encoding of another that it stands in for."""
    encoding, errors = ("utf-8", "backslashreplace") if like is None else (like.encoding, like.errors)
    is_log = isinstance(file, _Log)
    return TextIOWrapper(BufferedWriter(file), encoding, errors, line_buffering=is_log or file.isatty())


def standard_input() -> TextIO:
    """Standard input. A byte that is not UTF-8 becomes half of a surrogate pair, in any locale, so that whoever reads
    the text can refuse it."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def write_out(text: str) -> None:
    """Write a piece of a text to standard output, where it is seen before the next one comes. Raises `BrokenPipeError`
    when nobody reads it any more."""
    print(text, end="", flush=True)
    file = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(file, _Output) and file.is_lost:
        raise BrokenPipeError
