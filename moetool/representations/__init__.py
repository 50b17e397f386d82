"""Ways to store one expert's matrix, one file each: its maths, its tensors on disk, its forward, its way back."""

import importlib
import inspect
import pkgutil
from functools import cache

from moetool.errors import InvalidInputError
from moetool.representations.base import Representation, Stored, Weight

__all__ = ["Representation", "Stored", "Weight", "parse_representation", "representations"]


@cache
def representations() -> dict[str, type[Representation]]:
    """Every representation in this directory, by kind."""
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
