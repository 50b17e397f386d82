"""Registers the transformers plug-in when transformers is imported, and not before.

`import moetool` must make `from_pretrained` work, and must also be instant, since it is the first thing that
`moetool --help` does; importing transformers takes seconds. So `import moetool` only leaves a note with the import
system, which registers the plug-in the moment transformers' quantizers are loaded.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_TARGET = "transformers.quantizers.auto"


class _RegisterAfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself; wraps the loader of one module so that registration follows its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    from moetool.integrations.transformers_plugin import register

    register()


def install() -> None:
    """Register now if transformers' quantizers are loaded, otherwise as soon as they are."""
    if _TARGET in sys.modules:
        _register()
    elif not any(isinstance(finder, _RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterAfterImport())
