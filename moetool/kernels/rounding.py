"""Switch that lets products of a few tokens with codes round the tokens to whole numbers, which is faster on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_LOCK = Lock()
_EXACT = 0  # callers that want exact products now, in whatever thread


def is_allowed() -> bool:
    """Whether tokens may be rounded: unless `MOETOOL_KERNELS=exact` is set, or someone is in `exact_products`."""
    return not _EXACT and os.environ.get("MOETOOL_KERNELS", "").lower() != "exact"


@contextmanager
def exact_products() -> Iterator[None]:
    """Have kernels multiply tokens as they are, for what is measured in here, or in a function that this decorates."""
    global _EXACT
    with _LOCK:
        _EXACT += 1
    try:
        yield
    finally:
        with _LOCK:
            _EXACT -= 1
