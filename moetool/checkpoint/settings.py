"""The settings of a model: what its `config.json` says, and what transformers fills in where that says nothing.

Every number that moetool computes with comes from here, since the model that runs has transformers' defaults: a Mixtral
whose config has no `num_key_value_heads` has 8 of them. What is written is patched in the `config.json` as it stands.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moetool.architectures.base import Settings
from moetool.architectures.derived import transformers_config
from moetool.errors import InvalidInputError, MoetoolError
from moetool.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_CONFIG = "config.json"


@contextmanager
def described_in(path: Path) -> Iterator[None]:
    """Whatever transformers raises over the files of a checkpoint's directory in a `with` block is an
    `InvalidInputError`: its validation, and the arithmetic of its modules, have errors of every class."""
    try:
        with quiet():
            yield
    except (MoetoolError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (" ".join(str(error).split())[:300] or type(error).__name__).rstrip(".")
        raise InvalidInputError(
            f"transformers cannot build the model that {path / _CONFIG} describes, or cannot run it: {reason}."
        ) from error


def model_config(config: Mapping[str, object], path: Path) -> "PreTrainedConfig":
    """transformers' config of a model, defaults filled in, without its `quantization_config`.

    Raises:
        InvalidInputError: transformers does not know the `model_type`, or refuses an entry.
    """
    with described_in(path):
        return transformers_config(config)


def settings_of(config: Mapping[str, object], path: Path) -> Settings:
    """The settings of a `config.json`.

    Raises:
        InvalidInputError: transformers does not know the `model_type`, or refuses an entry.
    """
    described = model_config(config, path)
    with described_in(path):
        return filled_in(described, config)


def filled_in(described: "PreTrainedConfig", config: Mapping[str, object]) -> Settings:
    """The entries of a `config.json` (of a model with others around it, those of the language model too) as
    transformers' config of it has them, under every name that it knows them by; `quantization_config` as it stands."""
    found = dict(config)
    for part in (described, described.get_text_config()):
        aliases = {alias: getattr(part, alias, None) for alias in part.attribute_map}
        found |= {name: value for name, value in vars(part).items() if not name.startswith("_")} | aliases
    kept = {key: value for key, value in config.items() if key == "quantization_config"}
    return Settings({**found, "model_type": described.model_type, **kept})
