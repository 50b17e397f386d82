"""The entries of a `config.json` that decide a model's modules: the key that derived architectures are cached by."""

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Entries that say nothing of the modules, and one of transformers' own that it does not take back.
_APART = {
    "quantization_config",
    "transformers_version",
    "architectures",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "ignore_keys_at_rope_validation",
}


def entries_of(config: Mapping[str, object]) -> str:
    """The entries of a `config.json`, or of settings, that decide a model's modules, as JSON with sorted keys."""
    entries = {key: value for key, value in config.items() if key not in _APART}
    return json.dumps(_own_entries(entries), sort_keys=True, default=_plain)


def _own_entries(config: Mapping[str, object]) -> dict[str, object]:
    """The entries of a model's config, without those of its parts that settings have beside its own; what files have
    there in the place of a part, as those of dots3, is their language model's."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return dict(config)
    kind: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    if "text_config" in kind.sub_configs and not config.get("text_config"):
        return dict(config)
    own = {field.name for field in dataclasses.fields(kind)} | {"model_type"}
    parts = (_plain(config[key]) for key in kind.sub_configs if config.get(key))
    repeated = {name for part in parts if isinstance(part, Mapping) for name in part} - own
    return {key: value for key, value in config.items() if key not in repeated and _is_taken(kind, key, value)}


def _is_taken(kind: "type[PreTrainedConfig]", key: str, value: object) -> bool:
    """Whether a class of configs takes an entry: one that it computes cannot be set, unless others are computed from
    it, as from Nemotron-H's `hybrid_override_pattern`."""
    found = getattr(kind, kind.attribute_map.get(key, key), None)
    if not isinstance(found, property) or found.fset is not None:
        return True
    try:
        kind(**{key: value})
    except Exception:  # an attribute that cannot be set; each class says so in its own way
        return False
    return True


def _plain(value: object) -> object:
    """A value as JSON can hold it: nested configs as mappings, all else as text."""
    return value.to_dict() if hasattr(value, "to_dict") else value if isinstance(value, Mapping) else str(value)
