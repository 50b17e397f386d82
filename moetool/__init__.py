"""moetool: dense checkpoints into mixtures of experts, and mixtures of experts made smaller.

Importing it makes `transformers.AutoModelForCausalLM.from_pretrained` load moetool checkpoints.
"""

from typing import TYPE_CHECKING, Any

from moetool.integrations import autoload

if TYPE_CHECKING:
    from moetool.integrations.synthesis import synthesise
    from moetool.modules.neuron_experts import set_keep

__version__ = "0.1.0"
__all__ = ["__version__", "set_keep", "synthesise"]

autoload.install()


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds, and not only for --help.
    if name == "synthesise":
        from moetool.integrations.synthesis import synthesise

        return synthesise
    if name == "set_keep":
        from moetool.modules.neuron_experts import set_keep

        return set_keep
    raise AttributeError(f"module 'moetool' has no attribute '{name}'")
