"""Registers what transformers has to know about moetool when transformers is imported, and not before.

`import moetool` must make `from_pretrained` work, and must also be instant, since it is the first thing that
`moetool --help` does; importing transformers takes seconds. So `import moetool` only leaves a note with the import
system, which imports a module of ours the moment the part of transformers that it extends is loaded. These modules
register themselves as they are imported.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# Part of transformers → the module of ours that extends it.
_EXTENDED_BY = {
    "transformers.quantizers.auto": "moetool.runtime.plugin",
    "transformers.models.auto.configuration_auto": "moetool.runtime.deepseek_config",
    "transformers.integrations.moe": "moetool.runtime.modules.dense_experts",
}


class _RegisterAfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself; wraps the loader of one module so that registration follows its execution."""

    def __init__(self, target: str) -> None:
        self.target = target

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.target:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(fullname)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(target: str) -> None:
    importlib.import_module(_EXTENDED_BY[target])


def install() -> None:
    """Register now what transformers has loaded already, the rest as soon as it is loaded."""
    waiting = {finder.target for finder in sys.meta_path if isinstance(finder, _RegisterAfterImport)}
    for target in _EXTENDED_BY:
        if target in sys.modules:
            _register(target)
        elif target not in waiting:
            sys.meta_path.insert(0, _RegisterAfterImport(target))
