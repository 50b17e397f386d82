"""The stages, one file each; every file that defines a `Stage` is found."""

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

from moetool.pipeline.stage import Stage


@cache
def stages() -> dict[str, type[Stage[Any]]]:
    """Every stage by name."""
    found: dict[str, type[Stage[Any]]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, Stage) and not inspect.isabstract(member):
                found[member.name] = member
    return found
