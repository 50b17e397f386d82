"""moetool: dense checkpoints into mixtures of experts, and mixtures of experts made smaller.

Importing it makes `transformers.AutoModelForCausalLM.from_pretrained` load moetool checkpoints.
"""

from moetool.integrations import autoload

__version__ = "0.1.0"
__all__ = ["__version__"]

autoload.install()
