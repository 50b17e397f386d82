"""Numbers that a `config.json` may have, by what they have to be, and the sentence that refuses any other."""

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import ErrorDetails

MOST = 2**31 - 1  # of any number of things
MOST_LAYERS, MOST_EXPERTS = 10_000, 100_000  # each has a name, of which lists are made


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    if list(layers) != sorted(set(layers)):
        raise ValueError("each may be there once, in ascending order")
    return layers


Count = Annotated[int, Field(strict=True, ge=1, le=MOST)]
LayerCount = Annotated[int, Field(strict=True, ge=1, le=MOST_LAYERS)]
ExpertCount = Annotated[int, Field(strict=True, ge=1, le=MOST_EXPERTS)]
Bytes = Annotated[int, Field(strict=True, ge=1, lt=2**63)]
Whole = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Name = Annotated[str, Field(strict=True, min_length=1)]
Layers = Annotated[tuple[Whole, ...], AfterValidator(_ascending)]  # indices of decoder layers


def explain(error: ValidationError, under: str = "") -> str:
    """Describe a validation error field by field: `head_dim is -4, but should be greater than or equal to 1`.

    Args:
        error: of pydantic.
        under: path that stands before the names of fields.
    """
    return "; ".join(dict.fromkeys(_explain(problem, under) for problem in error.errors(include_url=False)))


def _explain(problem: ErrorDetails, under: str) -> str:
    parts = [str(part) for part in problem["loc"] if not str(part).startswith("function-")]
    place = ".".join([under, *parts] if under else parts)
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").partition(" or instance of ")[0]
    if problem["type"] == "missing":
        return f"{place} is missing"
    if not place:
        return message
    if problem["type"] == "value_error" and isinstance(problem["input"], Mapping):
        return f"{place}: {message}"
    joint = ", but" if message.startswith("should") else ":"
    return f"{place} is {_short(problem['input'])}{joint} {message}"


def _short(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
