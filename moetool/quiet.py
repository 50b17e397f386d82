"""transformers without its progress bars and chatter, which would cut through our own."""

from collections.abc import Iterator
from contextlib import contextmanager

from moetool.errors import InvalidInputError, MoetoolError, in_one_line


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that silences transformers' progress bars and its log below errors. Within another it does
    nothing: a change of level makes Python go through all loggers."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if level < logging.ERROR:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        if level < logging.ERROR:
            logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Silence transformers in a `with` block, and turn any exception of its into an `InvalidInputError`.

    The message says "transformers cannot", `what` it was asked to do, and why: its errors are of every class.
    """
    from torch import OutOfMemoryError

    try:
        with quiet():
            yield
    except (MoetoolError, MemoryError, OutOfMemoryError):
        raise
    except Exception as error:
        reason = in_one_line(error, 300).rstrip(".")
        raise InvalidInputError(f"transformers cannot {what}: {reason}.") from error
