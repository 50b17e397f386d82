"""Every stage by name, and how one is planned and run."""

import importlib
import inspect
import pkgutil
from functools import cache
from pathlib import Path

from moetool.job import execute
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.progress import Progress
from moetool.job.result import Result
from moetool.job.stage import AnyStage, Stage

# Where stages are: in every file of a package, or in the one module.
_PLACES = ("compress.methods", "compress.stages", "upcycle.methods", "moefy.stage", "tune.stage")


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


def plan_stage(name: str, source: str | Path, options: RunOptions) -> Plan:
    """What a stage would cost; see `moetool.job.execute.plan_stage`."""
    return execute.plan_stage(stages()[name], source, options)


def run_stage(
    name: str,
    source: str | Path,
    output: str | Path,
    options: RunOptions,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Run a stage; see `moetool.job.execute.run_stage`."""
    kind = stages()[name]
    return execute.run_stage(kind, source, output, options, resume=resume, overwrite=overwrite, progress=progress)
