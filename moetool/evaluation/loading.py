"""Loading a model through transformers, quietly."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from moetool.errors import InvalidInputError


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and below-error messages, which would cut through ours."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


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
