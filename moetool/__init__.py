"""moetool: dense checkpoints into MoE models, and MoE models made smaller.

Importing it makes `transformers.AutoModelForCausalLM.from_pretrained` load moetool checkpoints.
"""

import importlib
from typing import TYPE_CHECKING

from moetool.runtime import autoload
from moetool.version import __version__

if TYPE_CHECKING:
    from moetool.runtime.modules.moefied import set_keep
    from moetool.runtime.paging import page_experts
    from moetool.runtime.synthesis import synthesize

__all__ = ["__version__", "page_experts", "set_keep", "synthesize"]

_PLACES = {
    "page_experts": "moetool.runtime.paging",
    "set_keep": "moetool.runtime.modules.moefied",
    "synthesize": "moetool.runtime.synthesis",
}

autoload.install()


def __getattr__(name: str) -> object:
    # Importing torch takes seconds, and not only for --help.
    if name not in _PLACES:
        raise AttributeError(f"module 'moetool' has no attribute '{name}'")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})  # for completion and `help(moetool)`
