"""Ways to store one expert's matrix, one file each: its maths, its tensors on disk, its forward, its way back.

Nothing outside asks which one it has: `base.Representation` says what they all can.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from functools import cache

from moetool.errors import InvalidInputError
from moetool.representations.base import Representation, Stored, Weight
from moetool.representations.measured import NOTHING, Measured

__all__ = [
    "NOTHING",
    "Measured",
    "Representation",
    "Stored",
    "Weight",
    "describe",
    "parse_representation",
    "representations",
]


@cache
def representations() -> dict[str, type[Representation]]:
    """Find every representation that a file of this directory defines, by its `kind` in specs."""
    found: dict[str, type[Representation]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, Representation) and hasattr(member, "kind"):
                found[member.kind] = member
    return found


def parse_representation(spec: str) -> Representation:
    """The representation a `config.json` names, e.g. `dense` or `low-rank:48`."""
    kind, *arguments = str(spec).split(":")
    known = representations()
    if kind not in known:
        raise InvalidInputError(
            f"Unknown representation '{spec}': this moetool knows {', '.join(sorted(known))}. Is it up to date?"
        )
    try:
        return known[kind].from_arguments(arguments)
    except ValueError as error:
        raise InvalidInputError(f"Bad representation '{spec}': {error}.") from error


def describe(forms: Iterable[Representation]) -> str:
    """Summarize the forms of a role's experts in a line: `rank 12 … 96, mean 40; 1 × dense`.

    Deltas come before whole matrices, and each in the order of their kinds.
    """
    by_kind: dict[type[Representation], list[Representation]] = {}
    for form in forms:
        by_kind.setdefault(type(form), []).append(form)
    kinds = sorted(by_kind, key=lambda kind: (not kind.uses_base, kind.kind))
    return "; ".join(part for kind in kinds for part in kind.describe(by_kind[kind]))
