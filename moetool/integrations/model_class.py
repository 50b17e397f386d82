"""Which of transformers' model classes a checkpoint is loaded as."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from moetool.architectures.dense import is_encoder


def model_class(config: Mapping[str, Any]) -> Any:
    """`AutoModelForMaskedLM` for a family of encoders, `AutoModelForCausalLM` for any other."""
    return AutoModelForMaskedLM if is_encoder(config) else AutoModelForCausalLM
