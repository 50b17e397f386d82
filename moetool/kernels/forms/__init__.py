"""Stored forms of matrices in Triton that are one file each, named after the kind of their operands.

A file has a function `decode(data, levels, row, column, at, mask)` of tensors of one dimension: it gives the numbers in
these rows and columns before they are scaled. `data` points to bytes, `levels` to what they stand for, and `at` is
`row * columns + column`; where `mask` is false there is no number.
"""

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def decoder(kind: str) -> Any:
    """The function of Triton that decodes operands of this kind; `None` if there is no such file."""
    name = f"{__name__}.{kind}"
    return None if find_spec(name) is None else importlib.import_module(name).decode
