"""Kinds of custom modules, one file each. A file in this directory that defines `KIND` is known."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from moetool.errors import InvalidInputError
from moetool.format.kinds.base import CustomModule
from moetool.format.marker import moetool_entry

__all__ = ["CustomModule", "custom_module", "kinds"]


@cache
def kinds() -> Mapping[str, type[CustomModule]]:
    """Find every kind of custom module, by its key in `quantization_config`."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = [module.KIND for module in modules if hasattr(module, "KIND")]
    return {kind.key: kind for kind in sorted(found, key=lambda kind: kind.key)}


def custom_module(config: Mapping[str, object]) -> CustomModule | None:
    """The custom modules that a `config.json` describes, `None` for a model without.

    Raises:
        InvalidInputError: there are two kinds, or the entry is not what it has to be.
    """
    entry = moetool_entry(config) or {}
    found = [key for key in kinds() if entry.get(key) is not None]
    if len(found) > 1:
        raise InvalidInputError(f"quantization_config: has {' and '.join(found)}: a model is one of these.")
    return kinds()[found[0]].from_config(entry[found[0]]) if found else None
