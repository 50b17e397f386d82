"""Every stage by name; `moetool.job.planning` plans them, and `moetool.job.execute` runs them."""

import importlib
import inspect
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moetool.job.stage import AnyStage

# Where stages are: in every file of a package, or in the one module.
PLACES = (
    "compress.methods",
    "compress.stages",
    "export.formats",
    "reduce.methods",
    "upcycle.methods",
    "moefy.stage",
    "tune.stage",
    "repair.stage",
)


@cache
def stages() -> dict[str, type["AnyStage"]]:
    """Every stage by name: whatever defines a `Stage` in the places above.

    Raises:
        TypeError: a command is called otherwise than its file, by whose name the command line finds it.
    """
    from moetool.job.stage import Stage

    found: dict[str, type[AnyStage]] = {}
    for place in PLACES:
        home = importlib.import_module(f"moetool.{place}")
        inside = [f"{home.__name__}.{info.name}" for info in pkgutil.iter_modules(getattr(home, "__path__", ()))]
        for module in map(importlib.import_module, inside or [home.__name__]):
            for _, member in inspect.getmembers(module, inspect.isclass):
                if issubclass(member, Stage) and hasattr(member, "name") and not inspect.isabstract(member):
                    called = module.__name__.rpartition(".")[2].replace("_", "-")
                    if inside and member.method_of is None and member.name != called:
                        raise TypeError(f"{module.__file__}: a stage's name is that of its file, here {called!r}.")
                    found[member.name] = member
    return found
