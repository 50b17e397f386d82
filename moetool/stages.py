"""Every stage by name; `moetool.job.execute` plans and runs them."""

import importlib
import inspect
import pkgutil
from functools import cache

from moetool.job.stage import AnyStage, Stage

# Where stages are: in every file of a package, or in the one module.
_PLACES = (
    "compress.methods",
    "compress.stages",
    "export.formats",
    "reduce.methods",
    "upcycle.methods",
    "moefy.stage",
    "tune.stage",
)


@cache
def stages() -> dict[str, type[AnyStage]]:
    """Every stage by name: whatever defines a `Stage` in the places above."""
    found: dict[str, type[AnyStage]] = {}
    for place in _PLACES:
        home = importlib.import_module(f"moetool.{place}")
        inside = [f"{home.__name__}.{info.name}" for info in pkgutil.iter_modules(getattr(home, "__path__", ()))]
        for module in map(importlib.import_module, inside or [home.__name__]):
            for _, member in inspect.getmembers(module, inspect.isclass):
                if issubclass(member, Stage) and hasattr(member, "name") and not inspect.isabstract(member):
                    found[member.name] = member
    return found
