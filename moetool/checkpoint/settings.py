"""The settings of a model: what its `config.json` says, and what transformers fills in where that says nothing.

Every number that moetool computes with comes from here, since the model that runs has transformers' defaults: a Mixtral
whose config has no `num_key_value_heads` has 8 of them. What is written is patched in the `config.json` as it stands.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from moetool.architectures.base import Settings
from moetool.architectures.described import transformers_config
from moetool.checkpoint.names import CONFIG
from moetool.quiet import refused

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def described_in(path: Path) -> AbstractContextManager[None]:
    """Turn any exception of transformers over a checkpoint's files in a `with` block into an `InvalidInputError`.

    Its validation, and the arithmetic of its modules, raise errors of every class.
    """
    return refused(f"build the model that {path / CONFIG} describes, or cannot run it")


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
