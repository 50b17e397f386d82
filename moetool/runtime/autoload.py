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
    "transformers.models.dbrx.modeling_dbrx": "moetool.runtime.families.dbrx",
    "transformers.models.jetmoe.modeling_jetmoe": "moetool.runtime.families.jetmoe",
    "transformers.models.longcat_flash.modeling_longcat_flash": "moetool.runtime.families.longcat_flash",
}


class _RegisterAfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself; wraps the loader of one module so that registration follows its execution. Where that has
    begun before, it waits for the first part of transformers that is loaded once the module is complete."""

    def __init__(self, target: str) -> None:
        self.target = target

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        has_begun = self.target in sys.modules and fullname.startswith("transformers.")
        if fullname != self.target and not has_begun:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if fullname == self.target or _is_ready(self.target):
                _register(self.target)
            else:
                sys.meta_path.insert(0, self)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _is_ready(target: str) -> bool:
    """Whether a part of transformers is loaded, and nothing that registration builds on only in part."""
    return target in sys.modules and not any(map(_is_half_loaded, (target, "torch")))


def _is_half_loaded(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _register(target: str) -> None:
    importlib.import_module(_EXTENDED_BY[target])


def install() -> None:
    """Register now what transformers has loaded already, the rest as soon as it is loaded. `import torch` calls this,
    too, where moetool is installed (entry point of the group `torch.backends`), so that tools that never heard of
    moetool load its checkpoints: torch is not complete then, and perhaps being imported by transformers."""
    waiting = {finder.target for finder in sys.meta_path if isinstance(finder, _RegisterAfterImport)}
    for target in _EXTENDED_BY:
        if _is_ready(target):
            _register(target)
        elif target not in waiting:
            sys.meta_path.insert(0, _RegisterAfterImport(target))
