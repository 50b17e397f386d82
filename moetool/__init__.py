"""moetool: dense checkpoints into MoE models, and MoE models made smaller.

Importing it makes `transformers.AutoModelForCausalLM.from_pretrained` load moetool checkpoints.
"""

from typing import TYPE_CHECKING

from moetool.runtime import autoload
from moetool.version import __version__

if TYPE_CHECKING:
    from moetool.runtime.modules.moefied import set_keep
    from moetool.runtime.paging import page_experts
    from moetool.runtime.synthesis import synthesize

__all__ = ["__version__", "page_experts", "set_keep", "synthesize"]

autoload.install()


def __getattr__(name: str) -> object:
    # Importing torch takes seconds, and not only for --help.
    if name == "synthesize":
        from moetool.runtime.synthesis import synthesize

        return synthesize
    if name == "page_experts":
        from moetool.runtime.paging import page_experts

        return page_experts
    if name == "set_keep":
        from moetool.runtime.modules.moefied import set_keep

        return set_keep
    raise AttributeError(f"module 'moetool' has no attribute '{name}'")
