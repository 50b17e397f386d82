"""Loading a model through transformers, quietly."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from moetool.architectures.dense import is_encoder
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.integrations.quiet import quiet


def model_class(config: Mapping[str, Any]) -> Any:
    """`AutoModelForMaskedLM` for a family of encoders, `AutoModelForCausalLM` for any other."""
    return AutoModelForMaskedLM if is_encoder(config) else AutoModelForCausalLM


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str | None = None) -> Any:
    """A language model in evaluation mode; `device` may be a device map such as `"auto"`.

    Raises:
        InvalidInputError: transformers cannot load it.
    """
    try:
        with quiet():
            model = model_class(checkpoint.config).from_pretrained(
                checkpoint.path, dtype=dtype, device_map=device, trust_remote_code=False
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InvalidInputError(f"transformers cannot load {checkpoint.path}: {reason}") from error
    return model.eval()
