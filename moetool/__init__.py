"""moetool: dense checkpoints into mixtures of experts, and mixtures of experts made smaller.

Importing it makes `transformers.AutoModelForCausalLM.from_pretrained` load moetool checkpoints.
"""

from typing import TYPE_CHECKING, Any

from moetool.runtime import autoload
from moetool.version import __version__

if TYPE_CHECKING:
    from moetool.runtime.modules.moefied import set_keep
    from moetool.runtime.synthesis import synthesise

__all__ = ["__version__", "set_keep", "synthesise"]

autoload.install()


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds, and not only for --help.
    if name == "synthesise":
        from moetool.runtime.synthesis import synthesise

        return synthesise
    if name == "set_keep":
        from moetool.runtime.modules.moefied import set_keep

        return set_keep
    raise AttributeError(f"module 'moetool' has no attribute '{name}'")
