"""Loading a model through transformers, quietly."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from moetool.errors import InvalidInputError
from moetool.integrations.quiet import quiet


def load_model(path: Path, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A causal language model in evaluation mode; `device` may be a device map such as `"auto"`.

    Raises:
        InvalidInputError: transformers cannot load it.
    """
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InvalidInputError(f"transformers cannot load {path}: {error}") from error
    return model.eval()
